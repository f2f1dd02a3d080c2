"""How an HF folder is laid out before a byte of it is known: shards, their headers, the index."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import DataError
from slimecli.weights.hf import DTYPE_NAMES, INDEX
from slimecli.weights.pieces import Shape
from slimecli.weights.pipeline import Packer

_ALIGN = 64
"""tensors of a shard begin at a multiple of this"""


class HfPlan:
    """Where each tensor goes.

    Args:
        tensors: name -> (dtype, shape), in the order they shall lie in the files.
        max_shard_bytes: largest shard (bytes), unless one tensor alone is larger.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, Shape]], max_shard_bytes: int) -> None:
        self.packer = Packer()
        self.nbytes = sum(_nbytes(*t) for t in tensors.values())
        shards = list(_shards(tensors, max_shard_bytes))
        self._where: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            single = len(shards) == 1
            file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._where.update(dict.fromkeys(names, file))
            self.packer.next_file(file)
            self.packer.literal(_header({n: tensors[n] for n in names}))
            for name in names:
                dtype, shape = tensors[name]
                self.packer.stream(name, math.prod(shape), dtype.itemsize)

    @property
    def shards(self) -> int:
        """How many files."""
        return len(self.packer.files)

    def finish(self, folder: Path) -> None:
        """Write the index, if there is more than one shard."""
        if self.shards > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": self._where}
            files.write_json(folder / INDEX, index)


def _nbytes(dtype: torch.dtype, shape: Shape) -> int:
    return math.prod(shape) * dtype.itemsize


def _shards(tensors: Mapping[str, tuple[torch.dtype, Shape]], limit: int) -> Iterator[list[str]]:
    """Names of each shard; a tensor goes into the next one if this would become too large."""
    names: list[str] = []
    size = 0
    for name, kind in tensors.items():
        if names and size + _nbytes(*kind) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += _nbytes(*kind)
    yield names


def _header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> bytes:
    """What a safetensors file begins with."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in DTYPE_NAMES:
            raise DataError(f"{name}: safetensors has no {dtype}", "choose another --dtype")
        end = position + _nbytes(dtype, shape)
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = -(-(8 + len(text)) // _ALIGN) * _ALIGN - 8
    return struct.pack("<Q", room) + text.ljust(room)
