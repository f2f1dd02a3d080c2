"""Collecting the samples of one step: groups in flight, dynamic filter, failure quota, interrupted answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from slimecli import files
from slimecli.errors import MissingStageError, SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.answering import Answering, Tally
from slimecli.rollout.executions import scores, stats
from slimecli.rollout.generate import UNFINISHED
from slimecli.rollout.source import DataSource, source_metrics, tell
from slimecli.rollout.versions import age_metrics, as_prompts, bounded, mask_said
from slimecli.rundir import RunDir
from slimecli.types import Group, Sample, SampleStatus


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What a step trains on, and how it came about."""

    groups: list[Group] = field(repr=False)
    """[batch_size] groups in prompt order; not in the repr, which asyncio.Runner makes of every result"""
    metrics: dict[str, float]
    """`rollout/...` values"""
    seconds: float = 0.0
    """time it took to generate them"""


class RolloutCollector:
    """Answers to the next prompts from the engine.

    Without `rollout.partial` groups are decided in prompt order. The first batch_size accepted ones are the batch; all
    that come after the last of them are given up, and their prompts go back to the source: which groups happened to be
    ready by then plays no part. Their answers go nowhere: the next step has other weights.

    With it, groups are decided as they finish. What still runs when the batch is full is interrupted, goes back as it
    is, and is continued later; so does a finished group too many. Which ones these are depends on timing.
    """

    def __init__(self, recipe: Recipe, source: DataSource, answering: Answering) -> None:
        self._recipe = recipe
        self._source = source
        self._answering = answering

    async def collect(self, step: int, version: int | None = None) -> Collection:
        """Generate until batch_size groups are accepted.

        Args:
            version: weights the engines hold; None: those that `step` trains.
        """
        section = self._recipe.rollout
        work = self._as_finished if section.partial else self._in_order
        tally = Tally(section.max_failed_fraction)
        begin = time.perf_counter()
        batch, surplus = await work(step, step - 1 if version is None else version, tally)
        tally.check()
        metrics = rollout_metrics(batch, self._recipe.reward.key or None) | tally.metrics() | age_metrics(batch, step)
        metrics |= {"rollout/surplus": float(surplus)} | source_metrics(self._source)
        return Collection(groups=batch, metrics=metrics, seconds=time.perf_counter() - begin)

    async def _in_order(self, step: int, version: int, tally: Tally) -> tuple[list[Group], int]:
        """(batch, groups given back)."""
        section, has_filter = self._recipe.rollout, self._answering.keep is not None
        accepted: list[Group] = []
        fallback: list[tuple[str, Group]] = []
        for _ in range(section.max_filtered_rounds):
            missing = section.batch_size - len(accepted)
            prompts = self._take(max(missing, section.over_sampling_batch_size) if has_filter else missing, step, tally)
            # without a filter every group is looked at, and nothing goes back
            pending = [[Sample.from_dict(s.to_dict()) for s in g] if has_filter else [] for g in prompts]
            tasks = [asyncio.create_task(self._answering.group(g, step, version)) for g in prompts]
            decided = 0
            try:
                while decided < len(tasks) and len(accepted) < section.batch_size:
                    group = await tasks[decided]
                    decided += 1
                    self._decide(group, accepted, fallback, tally)
            finally:
                await self._answering.cancel(tasks[decided:])
            tally.check()
            self._source.give_back(pending[decided:])
            lacking = section.batch_size - len(accepted)
            if lacking <= len(fallback):
                _fill(accepted, fallback, lacking, tally)
                return sorted(accepted, key=number_of), len(tasks) - decided
        raise self._starved(len(accepted), tally)

    async def _as_finished(self, step: int, version: int, tally: Tally) -> tuple[list[Group], int]:
        """(batch, finished groups given back)."""
        section = self._recipe.rollout
        accepted: list[Group] = []
        fallback: list[tuple[str, Group]] = []
        running: set[asyncio.Task[Group]] = set()
        rounds = 0
        try:
            while len(accepted) < section.batch_size:
                if len(accepted) + len(running) < section.batch_size:
                    tally.check()
                    missing = section.batch_size - len(accepted) - len(running)
                    if rounds and missing <= len(fallback):
                        _fill(accepted, fallback, missing, tally)
                        continue
                    if rounds == section.max_filtered_rounds:
                        raise self._starved(len(accepted), tally)
                    rounds += 1
                    taken = self._take(max(missing, section.over_sampling_batch_size), step, tally)
                    accepted += filter(is_whole, taken)  # they were too many, and have been decided
                    waiting = [group for group in taken if not is_whole(group)]
                    running |= {asyncio.create_task(self._answering.group(g, step, version)) for g in waiting}
                    continue
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in sorted((task.result() for task in done), key=number_of):
                    if is_whole(group):
                        self._decide(group, accepted, fallback, tally)
                    else:  # lost its engine or its time: goes on from there
                        running.add(asyncio.create_task(self._answering.group(group, step, version)))
            await self._answering.stop(running)
        except BaseException:
            await self._answering.cancel(running)
            raise
        stopped = sorted((task.result() for task in running), key=number_of)
        for group in filter(is_whole, stopped):
            self._decide(group, accepted, fallback, tally)
        surplus = whole = accepted[section.batch_size :]
        if section.mask_off_policy_tokens:  # a finished answer would be masked from end to end
            surplus = [as_prompts(g) for g in whole]
        self._source.give_back(sorted([*surplus, *(g for g in stopped if not is_whole(g))], key=number_of))
        return sorted(accepted[: section.batch_size], key=number_of), len(whole)

    def _take(self, count: int, step: int, tally: Tally) -> list[Group]:
        """The next groups of the source, without what is too old to be trained on."""
        section, taken = self._recipe.rollout, []
        for waiting in self._source.take(count):
            group, old = bounded(waiting, step, section)
            tally.stale += old
            if section.mask_off_policy_tokens:
                mask_said(group)
            taken.append(group)
        return taken

    def _decide(self, group: Group, accepted: list[Group], fallback: list[tuple[str, Group]], tally: Tally) -> None:
        reason, may_fill = self._answering.verdict(group)
        tally.add(group, reason)
        tell(self._source, group)
        if not reason:
            accepted.append(group)
        elif may_fill:
            fallback.append((reason, group))

    def _starved(self, accepted: int, tally: Tally) -> SlimeError:
        section = self._recipe.rollout
        return SlimeError(
            f"after {section.max_filtered_rounds} rounds only {accepted} of {section.batch_size} groups "
            f"passed the filter {section.dynamic_filter!r} (dropped: {dict(tally.dropped)})",
            "the task is too easy or too hard for this model: other data, or more rollout.max_filtered_rounds",
        )

    async def rest(self) -> None:
        """Nothing is generated between two steps."""

    async def proceed(self, version: int) -> None:
        """Nothing is generated before it is asked for."""

    def cursor(self) -> dict[str, Any]:
        """Where the source stands."""
        return {"source": self._source.state()}

    def prepare(self) -> None:
        """Make the next prompts ready."""
        self._source.prepare(self._recipe.rollout.batch_size)


def _fill(accepted: list[Group], fallback: list[tuple[str, Group]], count: int, tally: Tally) -> None:
    """Accept so many of the groups that were dropped, after all."""
    for reason, group in fallback[:count]:
        tally.dropped[reason] -= 1
        accepted.append(group)
    del fallback[:count]


def is_whole(group: Group) -> bool:
    """Whether none of its answers is to be begun or continued."""
    return all(s.status not in UNFINISHED for s in group)


def number_of(group: Group) -> int:
    """Where a group stands in the run."""
    return group[0].group_index or 0


def rollout_metrics(groups: list[Group], reward_key: str | None) -> dict[str, float]:
    """Means over the finished samples of a batch; of rewards, over its executions."""
    finished = [s for g in groups for s in g if s.status is not SampleStatus.FAILED]
    rewards = [scores(g, reward_key) for g in groups]
    flat = [r for rs in rewards for r in rs]
    n = len(finished)
    named: dict[str, list[float]] = {}
    for sample in finished:
        for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            named.setdefault(name, []).append(value)
    parts = {f"rollout/reward/{name}": sum(values) / len(values) for name, values in sorted(named.items())}
    parts |= {f"rollout/stats/{name}": value for name, value in stats(finished).items()}
    return parts | {
        "rollout/reward": sum(flat) / len(flat),
        "rollout/accuracy": sum(r >= 1.0 for r in flat) / len(flat),
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

    async def rest(self) -> None:
        """Nothing is generated."""

    async def proceed(self, version: int) -> None:
        """Nothing is generated."""

    def cursor(self) -> dict[str, Any]:
        """Where the source stands."""
        return {"source": self._source.state()}


class RecordedCollector:
    """Samples that were collected before and are on disk."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._cursor: dict[str, Any] = {}

    async def collect(self, step: int) -> Collection:
        """The stored samples and metrics of `step`."""
        path = self._run.data_state_path(step)
        if not path.is_file():
            raise MissingStageError(
                f"run {self._run.name} has no samples for step {step}", f"slime rollout --run {self._run.quoted}"
            )
        stored = files.read_json(path)
        self._cursor = {k: v for k, v in stored.items() if k not in ("step", "metrics")}
        return Collection(groups=self._run.read_samples(step), metrics=stored["metrics"])

    async def rest(self) -> None:
        """Nothing is generated."""

    async def proceed(self, version: int) -> None:
        """Nothing is generated."""

    def cursor(self) -> dict[str, Any]:
        """Where the source stood when the samples were collected."""
        return self._cursor
