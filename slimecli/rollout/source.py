"""Where prompts come from: an endless, seeded walk over a data set, with a buffer of groups given back.

The whole state is a small JSON value; restoring it continues the walk exactly, buffer included.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from slimecli.errors import DataError, SlimeError
from slimecli.seeds import derive_seed
from slimecli.types import Group, Sample


class DataSource(Protocol):
    """Hands out groups of pending samples and takes unfinished or surplus ones back."""

    def take(self, n: int) -> list[Group]:
        """The next n groups."""

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line."""

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


class PromptSource:
    """Cycles over template samples, reshuffled every epoch.

    Args:
        rows: one template per row: a pending prompt, or a finished demonstration.
        n_samples: copies per group.
        seed: root seed; epoch e is shuffled with derive_seed(seed, "epoch", e).
        shuffle: False keeps the file order in every epoch.
    """

    def __init__(self, rows: Sequence[Sample], n_samples: int, *, seed: int, shuffle: bool) -> None:
        if not rows:
            raise DataError("the data set has no rows", "check `slime prepare-data` and data.train")
        self._rows = rows
        self._n_samples = n_samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0
        self._next_group = 0
        self._next_sample = 0
        self._buffer: list[Group] = []
        self._order = self._epoch_order(0)
        self._spare: dict[int, Group] = {}
        """row number -> a group that is not numbered yet; not part of the state"""

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order

    def take(self, n: int) -> list[Group]:
        """The next n groups: buffered ones first, then fresh ones."""
        groups, self._buffer = self._buffer[:n], self._buffer[n:]
        while len(groups) < n:
            groups.append(self._fresh_group())
        return groups

    def _fresh_group(self) -> Group:
        if self._offset == len(self._rows):
            self._epoch += 1
            self._offset = 0
            self._order = self._epoch_order(self._epoch)
        row = self._order[self._offset]
        self._offset += 1
        group = self._spare.pop(row, None) or self._rows[row].copies(self._n_samples)
        for sample in group:
            sample.group_index, sample.index = self._next_group, self._next_sample
            self._next_sample += 1
        self._next_group += 1
        return group

    def prepare(self, n: int) -> None:
        """Do ahead what is slow about the next n fresh groups; what `take` and `state` answer stays the same."""
        for row in self._order[self._offset : self._offset + n]:
            if row not in self._spare:
                self._spare[row] = self._rows[row].copies(self._n_samples)

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line for the next take."""
        self._buffer = groups + self._buffer

    def state(self) -> dict[str, Any]:
        """Cursor, counters and buffer."""
        return {
            "rows": len(self._rows),
            "epoch": self._epoch,
            "offset": self._offset,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "buffer": [[s.to_dict() for s in g] for g in self._buffer],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; a data set of another size is refused."""
        if state["rows"] != len(self._rows):
            raise SlimeError(
                f"the data has {len(self._rows)} rows, but the checkpoint was made with {state['rows']}",
                "resume with the same data, or start a new run from the exported weights",
            )
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._buffer = [[Sample.from_dict(s) for s in g] for g in state["buffer"]]
        self._order = self._epoch_order(self._epoch)
