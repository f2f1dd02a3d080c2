"""Generation that never stops: groups are begun as long as they will not be too old, whatever the trainer does.

With `rollout.max_staleness` = s, as many groups are under way or waiting as the steps up to v + s + 1 can train on, v
being the weights that the engines hold. A batch takes the groups with the oldest weights first, and waits for one under
way only where leaving it to a later step would make it too old; so a long answer is neither dropped for its length nor
does it hold up the others before it must. Weights change under running answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from slimecli.errors import SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.answering import Answering, Tally
from slimecli.rollout.collect import Collection, number_of, rollout_metrics
from slimecli.rollout.source import DataSource, source_metrics, tell
from slimecli.rollout.versions import age_metrics, bounded, oldest_version
from slimecli.types import Group, Sample


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A group under way."""

    group: Group
    """as it was when it set out"""
    version: int
    """the oldest weights that speak in it"""


class ContinuousCollector:
    """Batches out of a stream of finished groups. All methods but `cursor` run on the event loop of the engines.

    Args:
        start: step whose weights the engines hold.
    """

    def __init__(self, recipe: Recipe, source: DataSource, answering: Answering, *, start: int) -> None:
        self._recipe = recipe
        self._source = source
        self._answering = answering
        self._version = self._collected = start
        self._flights: dict[asyncio.Task[None], Flight] = {}
        self._ready: list[Flight] = []
        self._tally = Tally(recipe.rollout.max_failed_fraction)
        self._trouble: BaseException | None = None
        self._news = asyncio.Event()
        self._cursor: dict[str, Any] = {}
        self._note_cursor()

    async def proceed(self, version: int) -> None:
        """The engines hold these weights from now on."""
        self._version = version
        self._fill()

    async def rest(self) -> None:
        """Weights change while answers are under way."""

    def _fill(self) -> None:
        """Begin as many groups as will not be too old when they are trained on."""
        section = self._recipe.rollout
        if self._trouble is not None or self._is_starved():
            return
        last = min(self._version + section.max_staleness + 1, self._recipe.steps)
        room = (last - self._collected) * section.batch_size - len(self._ready) - len(self._flights)
        for group in self._source.take(max(0, min(room, self._answering.at_once - len(self._flights)))):
            spoken = [v for s in group if (v := oldest_version(s)) is not None]
            begun = [Sample.from_dict(s.to_dict()) for s in group]
            flight = Flight(group=begun, version=min([self._version, *spoken]))
            task = asyncio.create_task(self._fly(group, flight))
            self._flights[task] = flight
            task.add_done_callback(self._landed)

    async def _fly(self, group: Group, flight: Flight) -> None:
        done = await self._answering.group(group, self._version + 1, self._version)
        reason, _ = self._answering.verdict(done)
        self._tally.add(done, reason)
        tell(self._source, done)
        if not reason:
            self._ready.append(Flight(group=done, version=flight.version))

    def _landed(self, task: asyncio.Task[None]) -> None:
        del self._flights[task]
        if not task.cancelled():
            self._trouble = self._trouble or task.exception()
            self._fill()
        self._news.set()

    async def collect(self, step: int) -> Collection:
        """The batch of a step, as soon as it can be made without making another too old."""
        section = self._recipe.rollout
        while True:
            self._news.clear()
            if self._trouble is not None:
                raise self._trouble
            self._check()
            self._return_stale(step)
            if (batch := self._choose(step)) is not None:
                break
            await self._news.wait()
        self._tally.check()
        self._collected = step
        metrics = rollout_metrics(batch, self._recipe.reward.key or None) | self._tally.metrics()
        metrics |= age_metrics(batch, step) | {"rollout/surplus": float(len(self._ready))}
        metrics |= source_metrics(self._source)
        self._tally = Tally(section.max_failed_fraction)
        self._fill()
        self._note_cursor()
        return Collection(groups=batch, metrics=metrics)

    def _is_starved(self) -> bool:
        """Whether more groups were dropped for one batch than the recipe allows."""
        section = self._recipe.rollout
        most = section.max_filtered_rounds * max(section.batch_size, section.over_sampling_batch_size)
        return self._tally.dropped.total() >= most

    def _check(self) -> None:
        """Raise where a filter leaves nothing over, or too much fails."""
        if self._is_starved():
            self._tally.check()
            raise SlimeError(
                f"{self._tally.dropped.total()} groups were dropped before {self._recipe.rollout.batch_size} were "
                f"accepted ({dict(self._tally.dropped)})",
                "the task is too easy or too hard for this model: other data, or more rollout.max_filtered_rounds",
            )

    def _return_stale(self, step: int) -> None:
        """Groups that grew too old while they waited are begun anew."""
        kept = []
        for flight in self._ready:
            group, old = bounded(flight.group, step, self._recipe.rollout)
            self._tally.stale += old
            if old and self._recipe.rollout.stale == "drop":
                self._source.give_back([group])
            else:
                kept.append(flight)
        if len(kept) < len(self._ready):
            self._ready = kept
            self._fill()

    def _choose(self, step: int) -> list[Group] | None:
        """The ready groups with the oldest weights; None while there are too few, or where one must be waited for."""
        section = self._recipe.rollout
        self._ready.sort(key=lambda f: (f.version, number_of(f.group)))
        chosen, left = self._ready[: section.batch_size], self._ready[section.batch_size :]
        if len(chosen) < section.batch_size:
            return None
        versions = sorted([f.version for f in left] + [f.version for f in self._flights.values()])
        late = [v for i, v in enumerate(versions) if i >= (v + section.max_staleness + 1 - step) * section.batch_size]
        if late and any(f.version <= max(late) for f in self._flights.values()):
            return None
        self._ready = left
        return sorted((f.group for f in chosen), key=number_of)

    def _note_cursor(self) -> None:
        """Whoever is under way sets out again after a resume, from where it was; who is ready stays ready."""
        waiting = sorted((f.group for f in [*self._ready, *self._flights.values()]), key=number_of)
        self._cursor = {"source": self._source.state(), "waiting": [[s.to_dict() for s in g] for g in waiting]}

    def cursor(self) -> dict[str, Any]:
        """Where the source stood when the last batch was collected, and the groups that it had handed out by then."""
        return self._cursor
