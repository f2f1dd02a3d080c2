"""How a Megatron `torch_dist` checkpoint is laid out, and what makes one of its data files.

A folder holds `__0_N.distcp` (tensors and objects as torch.save writes them, one after the other), `.metadata` (a
pickle of torch.distributed.checkpoint classes that says what lies where), `common.pt` and `metadata.json`. Layer keys
carry their number, and `non_homogeneous_layers` in common.pt makes every Megatron ask for them in that form.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from slimecli import files
from slimecli.errors import DataError
from slimecli.weights.container import container
from slimecli.weights.direct import BLOCK
from slimecli.weights.maps.rule import ZEROS as ZERO_ROWS
from slimecli.weights.maps.rule import Rule
from slimecli.weights.pieces import cut
from slimecli.weights.pipeline import ZEROS, Packer

FILE_BYTES = 8 << 30
"""a new .distcp file is begun beyond this size"""
_ALIGN = 64
"""objects and small tensors begin at multiples of this, so that lanes of tensors lie on even addresses in memory"""


class TorchDistPlan:
    """Where each chunk goes.

    Args:
        rules: the weight map.
        kinds: HF name -> dtype in the checkpoint.
        objects: keys of the objects `[None]`.
        folder: of the data files, below the result's.
    """

    def __init__(
        self, rules: Iterable[Rule], kinds: Mapping[str, torch.dtype], objects: list[str], folder: str
    ) -> None:
        self.packer = Packer()
        self._folder = folder
        self._storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._entries: dict[str, Any] = {}
        self._next_file()
        for rule in rules:
            self._add(rule, common_dtype(rule, kinds))
        empty = _saved([None])
        for key in objects:
            if key not in self._entries:
                self._place(dcp.MetadataIndex(key), len(empty))
                self.packer.literal(empty)
                self._entries[key] = dcp.BytesStorageMetadata()

    def _next_file(self) -> None:
        self.packer.next_file(f"{self._folder}/__0_{len(self.packer.files)}.distcp")

    def _place(self, index: dcp.MetadataIndex, size: int) -> None:
        """Note that the next `size` bytes hold this."""
        if self.packer.position > FILE_BYTES:
            self._next_file()
        self.packer.align(_ALIGN if size < BLOCK else BLOCK)
        name = self.packer.files[-1][0].rpartition("/")[2]
        self._storage[index] = _StorageInfo(name, self.packer.position, size)

    def _add(self, rule: Rule, dtype: torch.dtype) -> None:
        entry = self._entries.get(rule.key)
        if entry is None:
            properties = dcp.TensorProperties(dtype)
            entry = dcp.TensorStorageMetadata(properties, torch.Size(rule.full), [])
            self._entries[rule.key] = entry
        elif entry.properties.dtype != dtype:
            raise DataError(f"parts of {rule.key} have different dtypes", "convert with --dtype bfloat16")
        low, ends = 0, run_ends(rule)
        for offset, shape in cut(rule.chunk, dtype.itemsize):
            count = math.prod(shape)
            there = torch.Size([a + b for a, b in zip(rule.offset, offset, strict=True)])
            around = container(dtype, shape)
            self._place(dcp.MetadataIndex(rule.key, there), around.size)
            entry.chunks.append(dcp.ChunkStorageMetadata(there, torch.Size(shape)))
            spans = _spans(rule, ends, low, low + count, dtype.itemsize)
            self.packer.tensor(spans, around.nbytes, dtype.itemsize, around)
            low += count

    def finish(self, folder: Path, args: Mapping[str, Any]) -> None:
        """Write what makes a Megatron checkpoint of the data files.

        Args:
            args: Megatron arguments by attribute name, for common.pt.
        """
        meta = dcp.Metadata(self._entries, storage_data=self._storage)
        files.write_bytes(folder / ".metadata", pickle.dumps(meta))
        content = {
            "non_homogeneous_layers": True,
            "singleton_local_shards": False,
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        common = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 1,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": content,
        }
        files.write_bytes(folder / "common.pt", _saved(common))
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        files.write_json(folder / "metadata.json", {**kind, "common_backend": "torch", "common_backend_version": 1})


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def common_dtype(rule: Rule, kinds: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of all HF tensors that make up a chunk."""
    found = {kinds[name] for name in rule.hf}
    if len(found) > 1:
        names = " and ".join(f"{n} {str(kinds[n]).removeprefix('torch.')}" for n in rule.hf)
        raise DataError(f"{rule.key} is made of {names}", "convert with --dtype bfloat16, so that they become the same")
    return found.pop()


def _spans(rule: Rule, ends: list[int], low: int, high: int, itemsize: int) -> Iterator[tuple[str, int, int]]:
    """(HF name, first element, end) of the elements [low, high) of a chunk, in order; zeros are counted in bytes."""
    names = list(rule.hf)
    if not rule.runs:
        yield names[0], low, high
        return
    number = bisect_right(ends, low)
    while low < high:
        run = rule.runs[number]
        stop = min(high, ends[number])
        begin = run.start * rule.width + low - (ends[number] - run.rows * rule.width)
        if run.source == ZERO_ROWS:
            yield ZEROS, 0, (stop - low) * itemsize
        else:
            yield names[run.source], begin, begin + stop - low
        low, number = stop, number + 1


def run_ends(rule: Rule) -> list[int]:
    """Element of the chunk that each run ends before."""
    return list(accumulate(run.rows * rule.width for run in rule.runs))


def chunk_ranges(rule: Rule) -> dict[str, list[tuple[int, int, int]]]:
    """HF name -> (its first element, the chunk's first element, elements) for each run, by the first."""
    if not rule.runs:
        return {name: [(0, 0, math.prod(shape))] for name, shape in rule.hf.items()}
    names = list(rule.hf)
    out: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names}
    for run, end in zip(rule.runs, run_ends(rule), strict=True):
        if run.source != ZERO_ROWS:
            count = run.rows * rule.width
            out[names[run.source]].append((run.start * rule.width, end - count, count))
    return {name: sorted(ranges) for name, ranges in out.items()}


def zero_ranges(rule: Rule) -> list[tuple[int, int]]:
    """(first element, end) of the chunk's elements that no HF tensor has."""
    ends = run_ends(rule)
    pairs = zip(rule.runs, ends, strict=True)
    return [(end - run.rows * rule.width, end) for run, end in pairs if run.source == ZERO_ROWS]
