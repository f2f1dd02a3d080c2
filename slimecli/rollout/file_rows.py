"""Rows of a file larger than memory: only the places where its lines begin are held."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

from slimecli.errors import DataError
from slimecli.types import Sample


class FileRows(Sequence[Sample]):
    """Samples of a JSONL file, made when they are asked for. Reading is safe from several threads.

    Args:
        make: (place for error texts, line) -> sample.
    """

    def __init__(self, path: Path, make: Callable[[str, bytes], Sample]) -> None:
        self._path = path
        self._make = make
        self._starts, self._ends = array("Q"), array("Q")
        begin = 0
        self._handle = path.open("rb")
        for line in self._handle:
            if line.strip():
                self._starts.append(begin)
                self._ends.append(begin + len(line))
            begin += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, number: int) -> bytes:
        """Row `number` as it stands in the file."""
        begin, end = self._starts[number], self._ends[number]
        raw = os.pread(self._handle.fileno(), end - begin, begin)
        if len(raw) != end - begin:
            raise DataError(f"{self._path} became shorter while it was in use", "prepare the data again")
        return raw

    def lines(self) -> Iterator[bytes]:
        """All rows, one after the other."""
        return (self.line(number) for number in range(len(self)))

    @overload
    def __getitem__(self, number: int) -> Sample: ...

    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...

    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        row = number % len(self)
        return self._make(f"{self._path} row {row + 1}", self.line(row))
