"""Where prompts come from: an endless, seeded walk over one or several data sets, with a buffer of groups given back.

The whole state is a small JSON value; restoring it continues the walk exactly, buffer included.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slimecli.errors import DataError, SlimeError
from slimecli.seeds import derive_seed
from slimecli.types import Group, Sample


class DataSource(Protocol):
    """Hands out groups of samples and takes unfinished or surplus ones back."""

    def take(self, n: int) -> list[Group]:
        """The next n groups."""

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line."""

    def prepare(self, n: int) -> None:
        """Do ahead what is slow about the next n groups; what `take` and `state` answer stays the same."""

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


def tell(source: DataSource, group: Group) -> None:
    """Let a source that learns from what became of its groups (a curriculum) know of one that is finished."""
    feedback = getattr(source, "feedback", None)
    if feedback is not None:
        feedback([group])


def source_metrics(source: DataSource) -> dict[str, float]:
    """What a source has to say about itself."""
    metrics = getattr(source, "metrics", None)
    said: dict[str, float] = metrics() if metrics is not None else {}
    return said


class Walk:
    """An endless walk over some rows, each once per epoch.

    Args:
        rows: row numbers.
        seeds: what the order of an epoch derives from, root seed first; the epoch is added.
        shuffle: False keeps the given order in every epoch.
    """

    def __init__(self, rows: Sequence[int], seeds: tuple[int | str, ...], *, shuffle: bool) -> None:
        self._rows = rows
        self._seeds = seeds
        self._shuffle = shuffle
        self._epoch = self._offset = 0
        self._order = self._epoch_order(0)

    def _epoch_order(self, epoch: int) -> array[int]:
        order = array("Q", self._rows)
        if self._shuffle:
            root, *parts = self._seeds
            random.Random(derive_seed(int(root), *parts, epoch)).shuffle(order)
        return order

    def __next__(self) -> int:
        if self._offset == len(self._rows):
            self._epoch += 1
            self._offset = 0
            self._order = self._epoch_order(self._epoch)
        self._offset += 1
        return self._order[self._offset - 1]

    def ahead(self, n: int) -> Sequence[int]:
        """The next n rows, as far as the epoch reaches."""
        return self._order[self._offset : self._offset + n]

    def state(self) -> dict[str, int]:
        """Where it is."""
        return {"epoch": self._epoch, "offset": self._offset}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._order = self._epoch_order(self._epoch)


BufferFilter = Callable[[list[Group], int], list[Group]]
"""(waiting groups, number wanted) -> those that come next, which it takes out of the list"""


class PromptSource:
    """Cycles over template samples, reshuffled every epoch; over several sources by weight, each at its own pace.

    Args:
        rows: one template per row: a pending prompt, or a finished demonstration.
        n_samples: copies per group.
        seed: root seed; epoch e is shuffled with derive_seed(seed, "epoch", e).
        shuffle: False keeps the file order in every epoch.
        mix: source -> weight, any positive numbers; empty: all rows are one source. A fresh group comes from source s
            with probability weight / sum of weights, drawn by derive_seed(seed, "mix", number of the group).
        sources: [rows] source of each row, for `mix`.
        pick: which waiting groups come first; None: those that were given back first.
    """

    def __init__(
        self,
        rows: Sequence[Sample],
        n_samples: int,
        *,
        seed: int,
        shuffle: bool,
        mix: Mapping[str, float] | None = None,
        sources: Sequence[str] = (),
        pick: BufferFilter | None = None,
    ) -> None:
        if not rows:
            raise DataError("the data set has no rows", "check `slime prepare-data` and data.train")
        self._rows = rows
        self._n_samples = n_samples
        self._seed = seed
        self._mix = dict(sorted((mix or {}).items()))
        self._pick = pick
        self._walks = {"": Walk(range(len(rows)), (seed, "epoch"), shuffle=shuffle)}
        if self._mix:
            self._walks = _walks_by_source(self._mix, sources, seed, shuffle)
        self._next_group = 0
        self._next_sample = 0
        self._buffer: list[Group] = []
        self._spare: dict[int, Group] = {}
        """row number -> a group that is not numbered yet; not part of the state"""

    def take(self, n: int) -> list[Group]:
        """The next n groups: buffered ones first, then fresh ones."""
        groups = self._from_buffer(n)
        while len(groups) < n:
            groups.append(self._fresh_group())
        return groups

    def _from_buffer(self, n: int) -> list[Group]:
        if self._pick is None or not self._buffer or n <= 0:
            groups, self._buffer = self._buffer[:n], self._buffer[n:]
            return groups
        before = len(self._buffer)
        groups = self._pick(self._buffer, n)
        if len(groups) > n or len(groups) + len(self._buffer) != before:
            raise SlimeError(
                f"rollout.buffer_filter returned {len(groups)} of {before} groups (wanted: at most {n}) and left "
                f"{len(self._buffer)} in the buffer",
                "take what is returned out of the buffer, and nothing else; what is to be thrown away as well",
            )
        return groups

    def _source_of(self, group: int) -> str:
        """The source that fresh group number `group` comes from."""
        if not self._mix:
            return ""
        draw = random.Random(derive_seed(self._seed, "mix", group))
        return draw.choices(list(self._mix), list(self._mix.values()))[0]

    def _fresh_group(self) -> Group:
        row = next(self._walks[self._source_of(self._next_group)])
        group = self._spare.pop(row, None) or self._rows[row].copies(self._n_samples)
        for sample in group:
            sample.group_index, sample.index = self._next_group, self._next_sample
            self._next_sample += 1
        self._next_group += 1
        return group

    def prepare(self, n: int) -> None:
        """Do ahead what is slow about the next n fresh groups; what `take` and `state` answer stays the same."""
        wanted = Counter(self._source_of(g) for g in range(self._next_group, self._next_group + n))
        for source, count in wanted.items():
            for row in self._walks[source].ahead(count):
                if row not in self._spare:
                    self._spare[row] = self._rows[row].copies(self._n_samples)

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line for the next take."""
        self._buffer = groups + self._buffer

    def state(self) -> dict[str, Any]:
        """Cursor, counters and buffer."""
        walks = {name: walk.state() for name, walk in self._walks.items()}
        return {
            "rows": len(self._rows),
            **({"walks": walks} if self._mix else walks[""]),
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "buffer": [[s.to_dict() for s in g] for g in self._buffer],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; a data set of another size, or other sources, are refused."""
        if state["rows"] != len(self._rows):
            raise SlimeError(
                f"the data has {len(self._rows)} rows, but the checkpoint was made with {state['rows']}",
                "resume with the same data, or start a new run from the exported weights",
            )
        walks = state.get("walks") or {"": state}
        if walks.keys() != self._walks.keys():
            raise SlimeError(
                f"data.mix names {', '.join(self._walks) or 'nothing'}, but the checkpoint was made with "
                f"{', '.join(walks) or 'one source'}",
                "resume with the same sources (their weights may change)",
            )
        for name, walk in self._walks.items():
            walk.restore(walks[name])
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._buffer = [[Sample.from_dict(s) for s in g] for g in state["buffer"]]


def _walks_by_source(mix: Mapping[str, float], sources: Sequence[str], seed: int, shuffle: bool) -> dict[str, Walk]:
    rows: dict[str, array[int]] = {name: array("Q") for name in mix}
    left_out: Counter[str] = Counter()
    for number, source in enumerate(sources):
        if source in rows:
            rows[source].append(number)
        else:
            left_out[source] += 1
    if left_out:
        found = ", ".join(f"{name or '(no source_name)'}: {count}" for name, count in sorted(left_out.items()))
        raise DataError(
            f"rows of sources that data.mix does not weight: {found}", "weight every source, or prepare less"
        )
    if lacking := [name for name in mix if not rows[name]]:
        raise DataError(
            f"data.mix weights {lacking[0]!r}, but no row has that metadata.source_name",
            f"the data has {', '.join(sorted(set(sources))) or 'no source names'}",
        )
    return {name: Walk(rows[name], (seed, "epoch", name), shuffle=shuffle) for name in mix}
