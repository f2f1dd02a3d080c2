"""Served conversations as a data source: what `slime serve --record` writes, a run trains on while serving goes on.

Sessions that name the same group are compared with each other; sessions that name none form groups in the order in
which they ended. The cursor is part of every checkpoint, so that no conversation is trained on twice or passed over.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from slimecli import console
from slimecli.errors import SlimeError
from slimecli.recipe_live import LiveSection
from slimecli.rundir import RunDir, open_run
from slimecli.serving.store import read_from, segments
from slimecli.types import Group, Sample, SampleStatus

PREFIX = "live:"
POLL_S = 0.2
NOTE_S = 30.0
"""a wait is explained to the person watching every so many seconds"""


def live_run(train: str, own: RunDir) -> RunDir | None:
    """The run whose conversations `data.train` names: `live:` its own, `live:NAME` another; None: it is a file."""
    if not train.startswith(PREFIX):
        return None
    name = train.removeprefix(PREFIX)
    return open_run(name) if name else own


class LiveSource:
    """A DataSource of finished groups.

    Args:
        folder: RunDir.live_dir of the run that is recorded into.
        n_samples: sessions per group.
        section: deadline of a wait, largest staleness.
    """

    def __init__(self, folder: Path, n_samples: int, section: LiveSection) -> None:
        self._folder = folder
        self._n = n_samples
        self._section = section
        self._place = (0, 0)
        """(segment, byte) of the next line"""
        self._partial: dict[str, list[list[dict[str, Any]]]] = {}
        """group -> the samples of each of its sessions so far"""
        self._ready: list[list[list[dict[str, Any]]]] = []
        self._buffer: list[Group] = []
        self._next_group = 0
        self._next_sample = 0
        self._next_session = 0
        self.dropped: Counter[str] = Counter()
        """reason -> sessions left out since the collector looked last"""

    def poll(self, wanted: float = math.inf) -> None:
        """Take in what was written since the last time, until so many groups are there.

        What is not read yet is no part of the state, which is written at every step.
        """
        for number, path in segments(self._folder, "sessions"):
            if number < self._place[0]:
                continue
            offset = self._place[1] if number == self._place[0] else 0
            for record, after in read_from(path, offset):
                if self.available >= wanted:
                    return
                self._place = (number, after)
                self._take_in(record)

    def _take_in(self, record: dict[str, Any]) -> None:
        samples = [s for s in record["samples"] if s.get("status") != SampleStatus.ABORTED.value]
        if not samples:
            self.dropped["aborted"] += 1
            return
        if not self._section.unscored and all(s.get("reward") is None and s.get("label") is None for s in samples):
            self.dropped["unrated"] += 1
            return
        group = self._partial.setdefault(record["group"], [])
        group.append(samples)
        if len(group) == self._n:
            self._ready.append(self._partial.pop(record["group"]))

    async def wait(self, n: int, step: int) -> None:
        """Until n groups are there that are fresh enough for `step`; raises when the deadline passes.

        Conversations older than live.max_staleness are left out and counted.
        """
        begin = said = time.monotonic()
        while True:
            self.poll(n)
            is_rest_unread = self._drop_stale(step)
            if self.available >= n:
                return
            if is_rest_unread:
                continue
            now = time.monotonic()
            if now - begin > self._section.wait_s:
                raise SlimeError(
                    f"step {step} waited {self._section.wait_s:g} s for {self._lacking(n)}",
                    f"talk to the server (slime serve --record), raise live.wait_s, or take fewer: rollout.batch_size. "
                    f"What has been said stays in {self._folder}; a resume goes on waiting",
                )
            if now - said > NOTE_S:
                said = now
                console.note(f"step {step} waits for {self._lacking(n)} ({now - begin:.0f} s)")
            await asyncio.sleep(POLL_S)

    @property
    def available(self) -> int:
        """Groups that `take` has now."""
        return len(self._buffer) + len(self._ready)

    def _lacking(self, n: int) -> str:
        open_ = sum(len(g) for g in self._partial.values())
        rest = f", {open_} session(s) in {len(self._partial)} incomplete group(s)" if open_ else ""
        gone = "".join(f", {n} left out: {why}" for why, n in sorted(self.dropped.items()))
        return f"{n} groups of {self._n} ended conversations in {self._folder}: {self.available} are there{rest}{gone}"

    def _drop_stale(self, step: int) -> bool:
        """Whether something was left out."""
        limit = self._section.max_staleness
        if limit < 0:
            return False
        kept = [g for g in self._ready if all(_staleness(s, step) <= limit for e in g for s in e)]
        if len(kept) < len(self._ready):
            self.dropped["stale"] += self._n * (len(self._ready) - len(kept))
            self._ready = kept
            return True
        return False

    def take(self, n: int) -> list[Group]:
        """The next n groups, given back ones first. `wait` has made sure that they are there."""
        self.poll(n)
        if self.available < n:
            raise SlimeError(f"there are no {self._lacking(n)}", "wait for them first")
        groups, self._buffer = self._buffer[:n], self._buffer[n:]
        while len(groups) < n:
            groups.append(self._numbered(self._ready.pop(0)))
        return groups

    def _numbered(self, sessions: list[list[dict[str, Any]]]) -> Group:
        group: Group = []
        for samples in sessions:
            for data in samples:
                sample = Sample.from_dict(data)
                sample.group_index, sample.index = self._next_group, self._next_sample
                sample.rollout_id = self._next_session
                self._next_sample += 1
                group.append(sample)
            self._next_session += 1
        self._next_group += 1
        return group

    def prepare(self, n: int) -> None:
        """Nothing can be done ahead."""

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line."""
        self._buffer = groups + self._buffer

    def state(self) -> dict[str, Any]:
        """Cursor, counters, and what was read and not yet taken."""
        return {
            "live": True,
            "segment": self._place[0],
            "offset": self._place[1],
            # copies: it is written by another thread while the next step collects
            "partial": {name: list(group) for name, group in self._partial.items()},
            "ready": list(self._ready),
            "buffer": [[s.to_dict() for s in g] for g in self._buffer],
            "next": [self._next_group, self._next_sample, self._next_session],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; one of another kind of data is refused."""
        if not state.get("live"):
            raise SlimeError("the checkpoint was made with prompts from a file", "resume with the same data.train")
        self._place = (state["segment"], state["offset"])
        self._partial, self._ready = state["partial"], state["ready"]
        self._buffer = [[Sample.from_dict(s) for s in g] for g in state["buffer"]]
        self._next_group, self._next_sample, self._next_session = state["next"]


def staleness(sample: Sample, step: int) -> int:
    """How many versions the oldest token of a sample lies behind the weights that `step` begins with."""
    return _staleness({"weight_versions": sample.weight_versions}, step)


def _staleness(data: dict[str, Any], step: int) -> int:
    numbers = [int(v) for v in data.get("weight_versions", ()) if str(v).isdigit()]
    return max(step - 1 - min(numbers), 0) if numbers else 0
