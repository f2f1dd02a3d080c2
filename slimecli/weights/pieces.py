"""Sources of tensors that are read in pieces, and the arithmetic of pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from slimecli.weights.direct import DiskFile
from slimecli.weights.hf import HfFolder
from slimecli.weights.quant import Dequantized

Shape = tuple[int, ...]
PIECE = 16 << 20
"""bytes that are carried at a time: memory is this times the threads; larger pieces are no faster"""


class Source(Protocol):
    """Tensors by their HF names, read element range by element range from several threads at once."""

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype as read."""

    def read_into(self, name: str, low: int, high: int, out: memoryview) -> None:
        """Elements [low, high) in row-major order, as bytes."""

    def close(self) -> None:
        """Close the files."""


class FileSource:
    """An HF folder. Files are read at positions, not mapped: mapped pages would count as this process's memory.

    Args:
        fresh: read the disk, not what the system has of it in its cache.
    """

    def __init__(self, folder: HfFolder, *, fresh: bool = False) -> None:
        self._entries = folder.entries
        self._open = {p: DiskFile(p, cached=not fresh) for p in {e.file for e in folder.entries.values()}}

    def shape(self, name: str) -> Shape:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def read_into(self, name: str, low: int, high: int, out: memoryview) -> None:
        entry = self._entries[name]
        self._open[entry.file].read(entry.offset + low * entry.dtype.itemsize, out)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class DequantizedSource:
    """A quantised HF folder as what it stands for."""

    def __init__(self, folder: Dequantized) -> None:
        self._folder = folder

    def shape(self, name: str) -> Shape:
        return self._folder.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._folder.entries[name].dtype

    def read_into(self, name: str, low: int, high: int, out: memoryview) -> None:
        width = max(1, math.prod(self.shape(name)[1:]))
        first = low // width
        rows = self._folder.read_rows(name, first, -(-high // width)).reshape(-1)
        out[:] = octets(rows[low - first * width : high - first * width])

    def close(self) -> None:
        """It keeps no file open."""


def source_of(folder: HfFolder | Dequantized) -> Source:
    """The folder as a source of pieces."""
    return FileSource(folder) if isinstance(folder, HfFolder) else DequantizedSource(folder)


def octets(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    view: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def cut(shape: Shape, itemsize: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, shape) of blocks of at most PIECE bytes, if one row of the last dimension fits; in row-major order.

    Every block is contiguous in the tensor, so the blocks are consecutive ranges of its elements.
    """
    total = math.prod(shape) * itemsize
    axis = next((i for i, n in enumerate(shape) if n > 1), None)
    if total <= PIECE or axis is None:
        yield (0,) * len(shape), shape
        return
    inner = total // shape[axis]
    if inner > PIECE:
        for index in range(shape[axis]):
            for offset, block in cut(shape[axis + 1 :], itemsize):
                yield (*(0,) * axis, index, *offset), (*(1,) * (axis + 1), *block)
        return
    # pieces of equal size, rather than full ones and a small rest
    count = -(-shape[axis] // (PIECE // inner))
    step = -(-shape[axis] // count)
    for start in range(0, shape[axis], step):
        offset = tuple(start if i == axis else 0 for i in range(len(shape)))
        yield offset, tuple(min(step, n - start) if i == axis else n for i, n in enumerate(shape))


def blocks_of_range(shape: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, shape) of blocks that together are the elements [low, high) of a tensor, in order."""
    if low >= high:
        return
    if len(shape) == 0:
        yield (), ()
        return
    if len(shape) == 1:
        yield (low,), (high - low,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-low // inner), high // inner
    if first > last:  # inside one index
        for offset, block in blocks_of_range(shape[1:], low - last * inner, high - last * inner):
            yield (last, *offset), (1, *block)
        return
    if low % inner:
        for offset, block in blocks_of_range(shape[1:], low % inner, inner):
            yield (first - 1, *offset), (1, *block)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if high % inner:
        for offset, block in blocks_of_range(shape[1:], 0, high % inner):
            yield (last, *offset), (1, *block)
