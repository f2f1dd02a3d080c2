"""Megatron's `torch_dist` checkpoints, read region by region without Megatron, a model or a process group.

Any layout that Megatron wrote is understood: layer keys numbered or stacked, tensors in whatever chunks the tensor,
pipeline and expert parallelism of the writer made of them.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import threading
from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from slimecli.errors import DataError
from slimecli.headers import TRACKER
from slimecli.weights.container import Place, find_tensor
from slimecli.weights.direct import DiskFile
from slimecli.weights.maps.rule import Rule
from slimecli.weights.pieces import Shape, blocks_of_range, octets
from slimecli.weights.torch_dist_write import chunk_ranges

IGNORED = re.compile(r"(^optimizer\.|_extra_state|rng_state|^common_state|^rerun_state)")
"""keys that are not weights"""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class _Unpickler(pickle.Unpickler):
    """Builds checkpoint metadata and nothing else: a downloaded .metadata must not be able to run code."""

    _allowed = {
        ("torch.distributed.checkpoint.metadata", n)
        for n in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    } | {
        # Megatron keeps the ranks' save plans with it
        *(
            ("torch.distributed.checkpoint.planner", n)
            for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("collections", "OrderedDict"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise DataError(
            f".metadata refers to {module}.{name}, which no torch_dist checkpoint needs",
            "do not use this checkpoint: it may run code when loaded",
        )


class _Chunks(NamedTuple):
    """The chunks of one stored tensor."""

    offsets: Any
    """[chunks, dimensions], sorted"""
    sizes: Any
    """[chunks, dimensions]"""
    widest: int
    """largest size in the first dimension"""
    storage: list[_StorageInfo]


class TorchDist:
    """A torch_dist checkpoint opened for reading; layer keys are understood numbered or stacked.

    Args:
        path: folder with the tracker file, or one iteration.
        fresh: read the disk, not what the system has of it in its cache.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path, self._fresh = find_iteration(path), fresh
        try:
            meta = _Unpickler(io.BytesIO((self.path / ".metadata").read_bytes())).load()
            storage: dict[dcp.MetadataIndex, _StorageInfo] = meta.storage_data
            self.entries: dict[str, Any] = meta.state_dict_metadata
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError) as error:
            raise DataError(f"{self.path / '.metadata'} is damaged: {error}", "copy the checkpoint again") from None
        self._storage = {(i.fqn, tuple(i.offset)): s for i, s in storage.items() if i.offset is not None}
        self._tables: dict[str, _Chunks] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._files: dict[str, DiskFile] = {}
        self._lock = threading.Lock()
        self._check_files(storage)

    def _check_files(self, storage: Mapping[dcp.MetadataIndex, _StorageInfo]) -> None:
        ends: dict[str, int] = {}
        for info in storage.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            if file.parent != self.path or not file.is_file() or file.stat().st_size < end:
                raise DataError(f"{file} is missing or truncated ({end} bytes expected)", "copy the checkpoint again")

    @cached_property
    def tensors(self) -> dict[str, Shape]:
        """Weight keys with their global shapes."""
        kind = dcp.TensorStorageMetadata
        return {k: tuple(e.size) for k, e in self.entries.items() if isinstance(e, kind) and not IGNORED.search(k)}

    def locate(self, key: str) -> tuple[str, Shape]:
        """(stored key, leading index): a numbered layer key may be stored as a slice of a stacked tensor."""
        known = self.tensors
        if key in known:
            return key, ()
        stacked = _LAYER.sub(".layers.", key, count=1)
        match = _LAYER.search(key)
        if match and stacked in known and int(match.group(1)) < known[stacked][0]:
            return stacked, (int(match.group(1)),)
        raise DataError(f"{self.path} has no tensor {key}", "check that the checkpoint is of the stated model")

    def shape(self, key: str) -> Shape:
        """Global shape of a (numbered) key."""
        stored, lead = self.locate(key)
        return self.tensors[stored][len(lead) :]

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a (numbered) key."""
        kind: torch.dtype = self.entries[self.locate(key)[0]].properties.dtype
        return kind

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """A region of a tensor, put together from whatever chunks it was written in."""
        out = torch.empty(shape, dtype=self.dtype(key))
        self.read_into(key, offset, shape, (0, out.numel()), octets(out))
        return out

    def read_into(self, key: str, offset: Shape, shape: Shape, span: tuple[int, int], out: memoryview) -> None:
        """Elements [span) of a region in row-major order, as bytes."""
        stored, lead = self.locate(key)
        size, at = self.entries[stored].properties.dtype.itemsize, 0
        for inner, block in blocks_of_range(shape, *span):
            begin = np.array([*lead, *(a + b for a, b in zip(offset, inner, strict=True))], np.int64)
            nbytes = math.prod(block) * size
            self._read_block(stored, begin, (*(1 for _ in lead), *block), out[at : at + nbytes])
            at += nbytes

    def _read_block(self, stored: str, begin: Any, size: Shape, out: memoryview) -> None:
        """A block of a stored tensor from every chunk that has a part of it."""
        offsets, sizes, widest, _ = self._chunks(stored)
        itemsize, shape = self.entries[stored].properties.dtype.itemsize, np.array(size, np.int64)
        target = np.frombuffer(out, f"u{itemsize}").reshape(size)
        near = slice(0, len(offsets))
        if len(size):
            near = slice(
                bisect_left(offsets[:, 0], begin[0] - widest + 1), bisect_left(offsets[:, 0], begin[0] + size[0])
            )
        low = np.maximum(offsets[near], begin)
        high = np.minimum(offsets[near] + sizes[near], begin + shape)
        covered = 0
        for number in np.nonzero((low < high).all(axis=1))[0]:
            lo, hi, chunk = low[number], high[number], near.start + int(number)
            inner = tuple((lo - offsets[chunk]).tolist())
            here = target[tuple(slice(a, b) for a, b in zip(lo - begin, hi - begin, strict=True))]
            self._read_part(stored, chunk, inner, here)
            covered += int(np.prod(hi - lo))
        if covered != math.prod(size):
            raise DataError(f"{self.path}: tensor {stored} is stored in part only", "copy the checkpoint again")

    def _read_part(self, stored: str, number: int, inner: Shape, target: Any) -> None:
        """A block of one chunk, from element `inner` of it, into an array of the block's shape."""
        chunk = self._chunks(stored)
        shape, itemsize = tuple(chunk.sizes[number].tolist()), target.dtype.itemsize
        info = chunk.storage[number]
        start = info.offset + self._place(stored, number).start
        steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = sum(i * step for i, step in zip(inner, steps, strict=True))
        count = 1 + sum((n - 1) * step for n, step in zip(target.shape, steps, strict=True))
        direct = count == target.size and target.flags.c_contiguous
        raw = target.reshape(-1) if direct else np.empty(count, target.dtype)
        self._file(info.relative_path).read(start + first * itemsize, raw.view(np.uint8).data)
        if not direct:
            strides = [step * itemsize for step in steps]
            target[...] = np.lib.stride_tricks.as_strided(raw, target.shape, strides)

    def _chunks(self, stored: str) -> _Chunks:
        """Where the chunks of a stored tensor lie, by offset."""
        if stored not in self._tables:
            chunks = sorted(self.entries[stored].chunks, key=lambda c: tuple(c.offsets))
            dims = len(self.tensors[stored])
            offsets = np.array([tuple(c.offsets) for c in chunks], np.int64).reshape(len(chunks), dims)
            sizes = np.array([tuple(c.sizes) for c in chunks], np.int64).reshape(len(chunks), dims)
            storage = [self._storage[stored, tuple(c.offsets)] for c in chunks]
            self._tables[stored] = _Chunks(offsets, sizes, int(sizes[:, :1].max(initial=0)), storage)
        return self._tables[stored]

    def _place(self, stored: str, number: int) -> Place:
        """Where the elements of a chunk begin in its container."""
        if (stored, number) in self._places:
            return self._places[stored, number]
        chunk = self._chunks(stored)
        info, entry = chunk.storage[number], self.entries[stored]
        held = self._file(info.relative_path)
        try:
            place = find_tensor(lambda count, at: held.pread(count, info.offset + at), info.length)
            if place.dtype != entry.properties.dtype or math.prod(place.shape) != int(chunk.sizes[number].prod()):
                raise ValueError(f"it holds {list(place.shape)} {place.dtype}")
        except ValueError as error:
            file = self.path / info.relative_path
            raise DataError(f"{file}: tensor {stored} is damaged: {error}", "copy the checkpoint again") from None
        self._places[stored, number] = place
        return place

    def _file(self, name: str) -> DiskFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = DiskFile(self.path / name, cached=not self._fresh)
            return self._files[name]

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()


class TorchDistSource:
    """The HF tensors that a torch_dist checkpoint stands for."""

    def __init__(self, checkpoint: TorchDist, rules: list[Rule]) -> None:
        self._checkpoint = checkpoint
        self._rules = {name: rule for rule in rules for name in rule.hf}
        self._ranges: dict[str, list[tuple[int, int, int]]] = {}
        for rule in rules:
            self._ranges |= chunk_ranges(rule)

    def shape(self, name: str) -> Shape:
        return self._rules[name].hf[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._checkpoint.dtype(self._rules[name].key)

    def read_into(self, name: str, low: int, high: int, out: memoryview) -> None:
        rule, ranges = self._rules[name], self._ranges[name]
        size, at = self.dtype(name).itemsize, 0
        number = bisect_left(ranges, low, key=lambda r: r[0] + r[2] - 1) if len(ranges) > 1 else 0
        while low < high:
            begin, there, count = ranges[number]
            stop = min(high, begin + count)
            span, nbytes = (there + low - begin, there + stop - begin), (stop - low) * size
            self._checkpoint.read_into(rule.key, rule.offset, rule.chunk, span, out[at : at + nbytes])
            low, at, number = stop, at + nbytes, number + 1

    def close(self) -> None:
        self._checkpoint.close()


def find_iteration(path: Path) -> Path:
    """The folder with .metadata: `path` itself, or what its tracker file names."""
    if (path / ".metadata").is_file():
        return path
    tracker = path / TRACKER
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        folder = path / ("release" if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else word)
        if (folder / ".metadata").is_file():
            return folder
        raise DataError(f"{tracker} names {word!r}, but {folder} has no .metadata", "copy the checkpoint again")
    raise DataError(
        f"{path} is no torch_dist checkpoint: neither .metadata nor {TRACKER}",
        "name what Megatron's --save named; an HF folder is named by --hf",
    )
