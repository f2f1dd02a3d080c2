"""Megatron's `torch_dist` checkpoints, written and read chunk by chunk without Megatron, a model or a process group.

A folder holds `__0_N.distcp` (one torch.save after the other), `.metadata` (a pickle of torch.distributed.checkpoint
classes that says what lies where), `common.pt` and `metadata.json`. Layer keys carry their number, and
`non_homogeneous_layers` in common.pt makes every Megatron ask for them in that form.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from slimecli import files
from slimecli.errors import DataError

TRACKER = "latest_checkpointed_iteration.txt"
FILE_BYTES = 8 << 30
"""a new .distcp file is begun beyond this size"""
IGNORED = re.compile(r"(^optimizer\.|_extra_state|rng_state|^common_state|^rerun_state)")
"""keys that are not weights"""
_LAYER = re.compile(r"\.layers\.(\d+)\.")

Shape = tuple[int, ...]


class TorchDistWriter:
    """Appends tensors and objects; `finish` makes the folder readable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._entries: dict[str, Any] = {}
        self._files = 0
        self._handle: IO[bytes] = self._next_file()

    def _next_file(self) -> IO[bytes]:
        self._files += 1
        return (self.folder / f"__0_{self._files - 1}.distcp").open("wb")

    def _append(self, index: dcp.MetadataIndex, value: object) -> None:
        if self._handle.tell() > FILE_BYTES:
            self._handle.close()
            self._handle = self._next_file()
        start = self._handle.tell()
        torch.save(value, self._handle)
        name = f"__0_{self._files - 1}.distcp"
        self._storage[index] = _StorageInfo(name, start, self._handle.tell() - start)

    def add(self, key: str, chunk: torch.Tensor, full: Shape, offset: Shape) -> None:
        """Write one chunk of a tensor of global shape `full`."""
        # torch.save writes the whole storage behind a view
        chunk = chunk.contiguous().clone() if chunk.untyped_storage().nbytes() != chunk.nbytes else chunk.contiguous()
        self._append(dcp.MetadataIndex(key, torch.Size(offset)), chunk)
        properties = dcp.TensorProperties(chunk.dtype)
        entry = self._entries.setdefault(key, dcp.TensorStorageMetadata(properties, torch.Size(full), []))
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), chunk.shape))

    def add_empty_object(self, key: str) -> None:
        """The `_extra_state` of a module that has none; Megatron expects a list with None."""
        self._append(dcp.MetadataIndex(key), [None])
        self._entries[key] = dcp.BytesStorageMetadata()

    def finish(self, args: Mapping[str, Any]) -> None:
        """Write what makes a Megatron checkpoint of the chunks.

        Args:
            args: Megatron arguments by attribute name, for common.pt.
        """
        self._handle.close()
        meta = dcp.Metadata(self._entries, storage_data=self._storage)
        files.write_bytes(self.folder / ".metadata", pickle.dumps(meta))
        common = io.BytesIO()
        torch.save(
            {
                "args": argparse.Namespace(**args),
                "checkpoint_version": 3.0,
                "iteration": 1,
                "num_floating_point_operations_so_far": 0,
                "content_metadata": {
                    "non_homogeneous_layers": True,
                    "singleton_local_shards": False,
                    "distrib_optim_sharding_type": "fully_reshardable",
                    "chained_optim_avoid_prefix": True,
                },
            },
            common,
        )
        files.write_bytes(self.folder / "common.pt", common.getvalue())
        files.write_json(
            self.folder / "metadata.json",
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            },
        )

    def abandon(self) -> None:
        """Close the open file after a failure."""
        self._handle.close()


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


class TorchDist:
    """A torch_dist checkpoint opened for reading; layer keys are understood numbered or stacked."""

    def __init__(self, path: Path) -> None:
        self.path = find_iteration(path)
        try:
            meta = _Unpickler(io.BytesIO((self.path / ".metadata").read_bytes())).load()
            storage: dict[dcp.MetadataIndex, _StorageInfo] = meta.storage_data
            self.entries: dict[str, Any] = meta.state_dict_metadata
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError) as error:
            raise DataError(f"{self.path / '.metadata'} is damaged: {error}", "copy the checkpoint again") from None
        self._storage = {(i.fqn, tuple(i.offset)): s for i, s in storage.items() if i.offset is not None}
        self._check_files(storage)

    def _check_files(self, storage: Mapping[dcp.MetadataIndex, _StorageInfo]) -> None:
        ends: dict[str, int] = {}
        for info in storage.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            if file.parent != self.path or not file.is_file() or file.stat().st_size < end:
                raise DataError(f"{file} is missing or truncated ({end} bytes expected)", "copy the checkpoint again")

    @property
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

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """A region of a tensor, put together from whatever chunks it was written in."""
        stored, lead = self.locate(key)
        begin, size = (*lead, *offset), (*(1 for _ in lead), *shape)
        entry = self.entries[stored]
        out = torch.empty(size, dtype=entry.properties.dtype)
        covered = 0
        for chunk in entry.chunks:
            low = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
            ends = zip(begin, size, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(lo >= hi for lo, hi in zip(low, high, strict=True)):
                continue
            part = self._load(stored, tuple(chunk.offsets)).reshape(tuple(chunk.sizes))
            here = tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, begin, strict=True))
            there = tuple(slice(lo - b, hi - b) for lo, hi, b in zip(low, high, chunk.offsets, strict=True))
            out[here] = part[there]
            covered += math.prod(hi - lo for lo, hi in zip(low, high, strict=True))
        if covered != out.numel():
            raise DataError(f"{self.path}: tensor {key} is stored in part only", "copy the checkpoint again")
        return out.reshape(shape)

    def _load(self, key: str, offset: Shape) -> torch.Tensor:
        info = self._storage[key, offset]
        with (self.path / info.relative_path).open("rb") as handle:
            handle.seek(info.offset)
            data = handle.read(info.length)
        try:
            loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise DataError(
                f"{self.path / info.relative_path}: tensor {key} is damaged: {error}", "copy it again"
            ) from None
        if not isinstance(loaded, torch.Tensor):
            raise DataError(f"{self.path}: {key} is not a tensor", "copy the checkpoint again")
        return loaded


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
    raise DataError(f"{path} is no torch_dist checkpoint: neither .metadata nor {TRACKER}", "name the --save folder")
