"""Batches that are generated while the trainer learns from earlier ones, by a fixed timetable.

With `rollout.max_staleness` = s and an update of the engines every `sync.interval` = n steps, batches run s - (n - 1)
steps ahead: once weights v are in the engines, all batches up to that of step v + s + 1 are generated, one after the
other. Before the next update they are all there, so the batch of a step always comes from the same weights, however
long anything takes: a run with a staleness is as reproducible as one without.

    s = 1, n = 1:   engines   batch 1, 2 by v0 | batch 3 by v1 | batch 4 by v2
                    trainer           step 1   |    step 2     |    step 3
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from slimecli.errors import SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.collect import Collection, RolloutCollector
from slimecli.rollout.versions import age


def are_usable(stored: Mapping[int, Collection], recipe: Recipe) -> bool:
    """Whether batches that an earlier attempt left may still be trained on: its recipe may have allowed older ones."""
    if recipe.rollout.fully_async or not recipe.rollout.overlaps:
        return not stored
    samples = [(step, s) for step, batch in stored.items() for group in batch.groups for s in group]
    return all(age(s, step) <= recipe.rollout.oldest for step, s in samples)


class AheadCollector:
    """Runs a RolloutCollector ahead of the loop. All methods but `cursor` run on the event loop of the engines.

    Args:
        stored: batches that an earlier attempt left, by step; the source stands after them.
        store: called with (step, batch, cursor after it) for each new batch, to write it down.
    """

    def __init__(
        self,
        recipe: Recipe,
        inner: RolloutCollector,
        *,
        start: int,
        stored: Mapping[int, Collection],
        store: Callable[[int, Collection, dict[str, Any]], None],
    ) -> None:
        self._steps, self._interval = recipe.steps, recipe.sync.interval
        self._ahead = recipe.rollout.max_staleness - (recipe.sync.interval - 1)
        self._inner = inner
        self._store = store
        self._ready = dict(stored)
        self._next = start + len(stored) + 1
        self._collected = start
        self._cursor, self._made = inner.cursor(), start + len(stored)
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()

    async def proceed(self, version: int) -> None:
        """Generate what is to come from these weights, which the engines hold now."""
        until = min(self._steps, version // self._interval * self._interval + self._interval + self._ahead)
        if self._next <= until and self._work is None:
            self._work = asyncio.create_task(self._generate(range(self._next, until + 1), version))

    async def _generate(self, steps: range, version: int) -> None:
        try:
            for step in steps:
                batch = await self._inner.collect(step, version)
                self._store(step, batch, self._inner.cursor())
                async with self._news:
                    self._ready[step] = batch
                    self._next = step + 1
                    self._news.notify_all()
        finally:
            async with self._news:
                self._news.notify_all()

    async def collect(self, step: int) -> Collection:
        """The batch of a step, as soon as it is there."""
        async with self._news:
            await self._news.wait_for(lambda: step in self._ready or self._work is None or self._work.done())
        if step not in self._ready:
            await self.rest()
        self._collected = step
        return self._ready.pop(step)

    async def rest(self) -> None:
        """Wait until all that was begun is there: the engines may change their weights now."""
        work, self._work = self._work, None
        if work is not None:
            await work
        self._cursor, self._made = self._inner.cursor(), self._next - 1

    def cursor(self) -> dict[str, Any]:
        """Where the source stood when the engines were last at rest, and how many batches made by then still wait."""
        if self._made < self._collected:
            raise SlimeError(
                f"a checkpoint after step {self._collected} lacks where the data stood",
                "make checkpoint.interval a multiple of sync.interval",
            )
        return self._cursor | {"ahead": self._made - self._collected}
