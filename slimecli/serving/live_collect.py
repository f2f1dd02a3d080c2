"""Served conversations as the samples of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.recipe import Recipe
from slimecli.rollout.answering import Tally
from slimecli.rollout.collect import Collection, rollout_metrics
from slimecli.rollout.generate import Generator
from slimecli.rundir import RunDir
from slimecli.serving.live_source import LiveSource, live_run, staleness
from slimecli.types import Group, SampleStatus, WeightReceipt


def live_source(recipe: Recipe, own: RunDir) -> LiveSource:
    """The conversations that `data.train` names."""
    run = live_run(recipe.data.train, own)
    assert run is not None, "the caller has looked at recipe.data.is_live"
    return LiveSource(run.live_dir, recipe.rollout.n_samples_per_prompt, recipe.live)


class LiveCollector:
    """Finished conversations; those with a label and without a reward are scored here.

    Args:
        generator: its reward function is used, never its engine.
    """

    def __init__(self, recipe: Recipe, source: LiveSource, generator: Generator) -> None:
        self._recipe = recipe
        self._source = source
        self._generator = generator

    async def collect(self, step: int) -> Collection:
        """Wait for batch_size groups whose conversations are all scored.

        A scorer that fails too often ends the run before it uses up what people have said: a resume scores it again.
        """
        wanted, groups = self._recipe.rollout.batch_size, list[Group]()
        tally = Tally(self._recipe.rollout.max_failed_fraction)
        while len(groups) < wanted:
            missing = wanted - len(groups)
            await self._source.wait(missing, step)
            for group in self._source.take(missing):
                done = await self._generator.group(group, [{} for _ in group])
                tally.add(done, "")
                if any(s.status is not SampleStatus.FAILED for s in done):
                    groups.append(done)
            tally.check()
        for sample in (s for g in groups for s in g if s.status is not SampleStatus.FAILED):
            sample.check()
        ages = [staleness(s, step) for g in groups for s in g]
        metrics = rollout_metrics(groups, self._recipe.reward.key or None) | {
            "rollout/reward_failed": float(tally.failed.total()),
            "rollout/sessions": float(len({s.rollout_id for g in groups for s in g})),
            "rollout/staleness": sum(ages) / len(ages),
            "rollout/staleness_max": float(max(ages)),
        }
        metrics |= {f"rollout/dropped/{why}": float(n) for why, n in sorted(self._source.dropped.items())}
        self._source.dropped.clear()
        return Collection(groups=groups, metrics=metrics)

    async def rest(self) -> None:
        """Nothing is generated here."""

    async def proceed(self, version: int) -> None:
        """Nothing is generated here."""

    def cursor(self) -> dict[str, Any]:
        """Where the source stands."""
        return {"source": self._source.state()}


class NoEngine:
    """In the place of an engine where a server of its own answers: nothing is generated, nothing is published."""

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """Refused."""
        raise SlimeError(
            "this run learns from served conversations and has no engine of its own",
            "for a reward function that generates: set engine.urls, or reward.type = 'judge'",
        )

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Refused."""
        raise SlimeError("this run has no engine", "the server takes its weights: slime serve --follow")

    async def abort(self, rid: str | None = None) -> None:
        """Nothing runs."""

    async def sleep(self, tags: tuple[str, ...] = ()) -> None:
        """It has no memory."""

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """It has no memory."""

    async def close(self) -> None:
        """Nothing is open."""
