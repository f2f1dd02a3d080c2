"""Groups on their way through the engines: so many at a time, each answer with a seed of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from slimecli.errors import SlimeError, UsageError
from slimecli.recipe import Recipe
from slimecli.rollout.generate import UNFINISHED, Generator, failure
from slimecli.rollout.sampling import rollout_sampling, rollout_seed
from slimecli.rollout.versions import stamp
from slimecli.types import Group, Sample, SampleStatus

ABORT_AGAIN_S = 1.0
"""an abort may overtake a request on its way to the engine, so it is repeated until all have answered (seconds)"""


class Answering:
    """Answers to prompts from the engine.

    Args:
        keep: (args, group) -> verdict of the dynamic filter; None keeps all.
    """

    def __init__(
        self, recipe: Recipe, generator: Generator, stop_token_ids: list[int], keep: Callable[..., Any] | None
    ) -> None:
        custom = generator.custom
        if recipe.rollout.partial and custom is not None and not getattr(custom, "supports_partial", False):
            raise UsageError(
                f"rollout.partial: {recipe.rollout.custom_generate} does not say that it can continue a sample",
                "if it can, write `FUNCTION.supports_partial = True` below it; if not, set rollout.partial = false",
            )
        self.recipe = recipe
        self.generator = dataclasses.replace(generator, partial=recipe.rollout.partial, stream=recipe.rollout.stream)
        self.keep = keep
        self._sampling = rollout_sampling(recipe, stop_token_ids)
        engines = len(recipe.engine.urls) or recipe.engine.replicas
        self.at_once = max(1, recipe.rollout.concurrency * engines // recipe.rollout.n_samples_per_prompt)
        """groups in flight"""
        self._slots = asyncio.Semaphore(self.at_once)
        self._stopping = False

    async def group(self, group: Group, step: int, version: int) -> Group:
        """Begin or continue the answers of a group; what is finished is left as it is.

        Args:
            step: whose batch they are for; a part of their seeds.
            version: weights the engines hold now.
        """
        async with self._slots:
            if self._stopping:
                return group
            params = [
                self._sampling | {"sampling_seed": rollout_seed(self.recipe, step, s.group_index or 0, i)}
                for i, s in enumerate(group)
            ]
            done = await self.generator.group(group, params)
        stamp(done, version)
        if any(s.status in UNFINISHED for s in done):
            return done  # interrupted: what is finished of it has no score yet
        for sample in done:
            if sample.status is not SampleStatus.FAILED:
                sample.check()
        return done

    async def stop(self, running: Iterable[asyncio.Task[Group]]) -> None:
        """Abort what runs, and wait until every group has come back with what it has."""
        self._stopping = True
        try:
            left = set(running)
            while left:
                await self.generator.engine.abort()
                _, left = await asyncio.wait(left, timeout=ABORT_AGAIN_S)
        finally:
            self._stopping = False

    async def cancel(self, running: Iterable[asyncio.Task[Group]]) -> None:
        """Give up what runs; nothing of it is wanted."""
        tasks = list(running)
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await self.generator.engine.abort()
        # of those that have failed as well, the first one is told
        await asyncio.gather(*tasks, return_exceptions=True)

    def verdict(self, group: Group) -> tuple[str, bool]:
        """(why a finished group is dropped, or an empty string; whether it may fill a step that lacks groups)."""
        if all(s.status is SampleStatus.FAILED for s in group):
            return "failed", False
        if self.keep is None:
            return "", False
        verdict = self.keep(self.generator.args, group)
        if isinstance(verdict, bool):
            return ("" if verdict else "filter"), False
        if verdict.keep:
            return "", False
        return verdict.reason or "filter", bool(getattr(verdict, "keep_when_insufficient", False))


class Tally:
    """What became of the groups of a step."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._answers = 0
        self._first: Sample | None = None
        self.failed: Counter[str] = Counter()
        """where (`reward`, `generation`, ...) -> answers that failed"""
        self.dropped: Counter[str] = Counter()
        """why -> groups"""
        self.stale = 0
        """answers with tokens that were too old"""

    def add(self, group: Group, reason: str) -> None:
        """Count a decided group."""
        self._answers += len(group)
        for sample in group:
            if sample.status is SampleStatus.FAILED:
                self._first = self._first or sample
                self.failed[failure(sample).partition(":")[0]] += 1
        if reason:
            self.dropped[reason] += 1

    def check(self) -> None:
        """Raise if more answers failed than the recipe tolerates."""
        if self._first is not None and self.failed.total() > self._allowed * self._answers:
            raise SlimeError(
                f"{self.failed.total()} of {self._answers} answers failed (allowed: {self._allowed:.0%}); "
                f"the first: {failure(self._first)}",
                "mend the cause; a higher rollout.max_failed_fraction tolerates more",
            )

    def metrics(self) -> dict[str, float]:
        """`rollout/failed`, `rollout/reward_failed` and `rollout/dropped/...`."""
        found = {
            "rollout/failed": float(self.failed.total()),
            "rollout/reward_failed": float(self.failed["reward"]),
            "rollout/stale": float(self.stale),
        }
        return found | {f"rollout/dropped/{reason}": float(n) for reason, n in sorted((+self.dropped).items())}
