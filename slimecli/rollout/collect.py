"""Collecting the samples of one step: groups in flight, dynamic filter, failure quota.

Groups are decided in the order in which their prompts were taken, never in the order in which they finish, so that
the same seed gives the same batch however requests interleave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slimecli import files
from slimecli.errors import MissingStageError, SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.generate import Generator, failure
from slimecli.rollout.sampling import rollout_sampling, rollout_seed
from slimecli.rollout.source import DataSource
from slimecli.rundir import RunDir
from slimecli.types import Group, Sample, SampleStatus


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What a step trains on, and how it came about."""

    groups: list[Group] = field(repr=False)
    """[batch_size] groups in prompt order; not in the repr, which asyncio.Runner makes of every result"""
    metrics: dict[str, float]
    """`rollout/...` values, deterministic"""


class RolloutCollector:
    """Answers to the next prompts from the engine."""

    def __init__(
        self,
        recipe: Recipe,
        source: DataSource,
        generator: Generator,
        stop_token_ids: list[int],
        keep: Callable[..., Any] | None = None,
    ) -> None:
        self._recipe = recipe
        self._source = source
        self._generator = generator
        self._sampling = rollout_sampling(recipe, stop_token_ids)
        self._keep = keep
        self._slots = asyncio.Semaphore(max(1, recipe.rollout.concurrency // recipe.rollout.n_samples_per_prompt))

    async def collect(self, step: int) -> Collection:
        """Generate until batch_size groups are accepted.

        Of accepted surplus the prompts go back to the source, without their answers: the next step has other weights,
        and answers of old ones would be trained on as if the new ones had given them.
        """
        section = self._recipe.rollout
        accepted: list[tuple[Group, Group]] = []
        dropped: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for _ in range(section.max_filtered_rounds):
            missing = section.batch_size - len(accepted)
            wanted = max(missing, section.over_sampling_batch_size) if self._keep else missing
            prompts = self._source.take(wanted)
            # without a filter there is no surplus, and nothing goes back
            pending = [[Sample.from_dict(s.to_dict()) for s in g] if self._keep else [] for g in prompts]
            groups = await asyncio.gather(*(self._one(step, g) for g in prompts))
            failed.update(self._check_failures(groups))
            for prompt, group in zip(pending, groups, strict=True):
                reason = self._reject_reason(group)
                if reason:
                    dropped[reason] += 1
                else:
                    accepted.append((prompt, group))
            if len(accepted) >= section.batch_size:
                break
        else:
            raise SlimeError(
                f"after {section.max_filtered_rounds} rounds only {len(accepted)} of {section.batch_size} groups "
                f"passed the filter {section.dynamic_filter!r} (dropped: {dict(dropped)})",
                "the task is too easy or too hard for this model: other data, or more rollout.max_filtered_rounds",
            )
        self._source.give_back([prompt for prompt, _ in accepted[section.batch_size :]])
        batch = [group for _, group in accepted[: section.batch_size]]
        metrics = rollout_metrics(batch, self._recipe.reward.key or None)
        metrics["rollout/failed"] = float(failed.total())  # those of groups that were dropped as well
        metrics["rollout/reward_failed"] = float(failed["reward"])
        metrics |= {f"rollout/dropped/{reason}": float(n) for reason, n in sorted(dropped.items())}
        return Collection(groups=batch, metrics=metrics)

    async def _one(self, step: int, group: Group) -> Group:
        async with self._slots:
            params = [
                self._sampling | {"sampling_seed": rollout_seed(self._recipe, step, s.group_index or 0, i)}
                for i, s in enumerate(group)
            ]
            done = await self._generator.group(group, params)
        for sample in done:
            if sample.status is not SampleStatus.FAILED:
                sample.check()
        return done

    def _reject_reason(self, group: Group) -> str:
        if all(s.status is SampleStatus.FAILED for s in group):
            return "failed"
        if self._keep is None:
            return ""
        verdict = self._keep(self._generator.args, group)
        keep, reason = (verdict, "") if isinstance(verdict, bool) else (verdict.keep, verdict.reason or "")
        return "" if keep else reason or "filter"

    def _check_failures(self, groups: list[Group]) -> Counter[str]:
        """Where (`reward`, `generation`, ...) how many answers failed; an error if the recipe tolerates fewer."""
        samples = [s for g in groups for s in g]
        failed = [s for s in samples if s.status is SampleStatus.FAILED]
        allowed = self._recipe.rollout.max_failed_fraction
        if len(failed) > allowed * len(samples):
            raise SlimeError(
                f"{len(failed)} of {len(samples)} answers failed (allowed: {allowed:.0%}); "
                f"the first: {failure(failed[0])}",
                "mend the cause; a higher rollout.max_failed_fraction tolerates more",
            )
        return Counter(failure(s).partition(":")[0] for s in failed)


def rollout_metrics(groups: list[Group], reward_key: str | None) -> dict[str, float]:
    """Means over the finished samples of a batch."""
    finished = [s for g in groups for s in g if s.status is not SampleStatus.FAILED]
    rewards = [[s.get_reward_value(reward_key) for s in g if s.status is not SampleStatus.FAILED] for g in groups]
    flat = [r for rs in rewards for r in rs]
    n = len(finished)
    named: dict[str, list[float]] = {}
    for sample in finished:
        for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            named.setdefault(name, []).append(value)
    parts = {f"rollout/reward/{name}": sum(values) / len(values) for name, values in sorted(named.items())}
    return parts | {
        "rollout/reward": sum(flat) / n,
        "rollout/accuracy": sum(r >= 1.0 for r in flat) / n,
        "rollout/response_length": sum(s.response_length for s in finished) / n,
        "rollout/truncated_fraction": sum(s.status is SampleStatus.TRUNCATED for s in finished) / n,
        "rollout/zero_variance_fraction": sum(len(set(rs)) <= 1 for rs in rewards) / len(groups),
    }


class DemonstrationCollector:
    """Finished demonstrations from the source: SFT's counterpart of a rollout."""

    def __init__(self, source: DataSource, batch_size: int) -> None:
        self._source = source
        self._batch_size = batch_size

    async def collect(self, step: int) -> Collection:
        """The next batch_size demonstrations."""
        groups = self._source.take(self._batch_size)
        length = sum(s.response_length for g in groups for s in g) / len(groups)
        return Collection(groups=groups, metrics={"rollout/response_length": length})


class RecordedCollector:
    """Samples that were collected before and are on disk."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    async def collect(self, step: int) -> Collection:
        """The stored samples and metrics of `step`."""
        path = self._run.data_state_path(step)
        if not path.is_file():
            raise MissingStageError(
                f"run {self._run.name} has no samples for step {step}", f"slime rollout --run {self._run.quoted}"
            )
        return Collection(groups=self._run.read_samples(step), metrics=files.read_json(path)["metrics"])
