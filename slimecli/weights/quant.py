"""HF folders with quantised weights, read as if they were ordinary bfloat16 ones (the way there: quant_fp8.py).

What is read, told from quantization_config in config.json:

    fp8, blocks         NAME e4m3 [.., rows, cols]       NAME_scale_inv [.., ceil(rows/128), ceil(cols/128)]
    fp8, no blocks      NAME e4m3                        NAME_scale or NAME_scale_inv, one per tensor or per row
    int4, groups of 32  X.weight_packed int32 [rows, cols/8], value + 8 in four bits, the lowest bits first
                        X.weight_scale [rows, cols/32]   X.weight_shape int [2]

A weight is its stored value times its scale, multiplied in float32 and rounded to bfloat16 once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from slimecli.errors import DataError
from slimecli.weights.hf import Entries, HfFolder, TensorEntry
from slimecli.weights.quant_codec import E4M3, LOGICAL, decode_e4m3, decode_int4, multiply_blocks
from slimecli.weights.quant_scheme import CONFIG_KEY, READABLE, Scheme, plain_config, scheme_of

SLAB = 1 << 20
"""elements dequantised at a time: float32 temporaries stay near the CPU's caches, whatever the tensor's size"""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_ACTIVATION_SCALE = re.compile(r"\.(input_scale|activation_scale|output_scale|k_scale|v_scale)$")
"""scales of activations and of the KV cache: no part of the weights"""


class Weights(Protocol):
    """What HfFolder and Dequantized have in common: named tensors of a model."""

    path: Path
    entries: dict[str, TensorEntry]

    @property
    def names(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def dtypes(self) -> dict[str, torch.dtype]: ...
    def config(self) -> dict[str, Any]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def iterate(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class _Packed:
    """One quantised tensor."""

    weight: TensorEntry
    """as stored"""
    scale: TensorEntry
    per: tuple[int, int]
    """rows and columns that share a scale"""
    shape_name: str = ""
    """tensor that repeats the logical shape (int4)"""


def open_weights(path: Path) -> HfFolder | Dequantized:
    """An HF folder whose tensors are the model's weights, however they are stored."""
    folder = HfFolder(path)
    scheme = scheme_of(folder.config())
    stored = _quantised_names(folder)
    if scheme.kind == "plain":
        if stored:
            raise DataError(
                f"{path}: {_some(stored)} hold quantised values, but config.json has no {CONFIG_KEY}",
                "restore config.json from the place the weights came from",
            )
        return folder
    if not stored:
        raise DataError(
            f"{path / 'config.json'} says {scheme.kind}, but no weight is stored so",
            f"if the weights were dequantised, remove {CONFIG_KEY} from config.json",
        )
    return Dequantized(folder, scheme)


class Dequantized(Entries):
    """A quantised folder that looks like an ordinary one: names, shapes and bytes of the bfloat16 model.

    `entries` name the file and offset where the stored form of a tensor begins (for order and messages); bytes are
    to be had through `read` and `read_rows` alone. Reading is safe from several threads.
    """

    def __init__(self, folder: HfFolder, scheme: Scheme) -> None:
        self.path, self._folder, self.scheme = folder.path, folder, scheme
        self._packed = self._pair()
        self.entries: dict[str, TensorEntry] = {}
        siblings = {p.scale for p in self._packed.values()} | {p.weight for p in self._packed.values()}
        shapes = {p.shape_name for p in self._packed.values()}
        for name, entry in folder.entries.items():
            if entry not in siblings and name not in shapes and not _ACTIVATION_SCALE.search(name):
                self.entries[name] = entry
        for name, packed in self._packed.items():
            entry, shape = packed.weight, self._shape(packed)
            size = math.prod(shape) * LOGICAL.itemsize
            self.entries[name] = TensorEntry(entry.file, entry.offset, size, LOGICAL, shape)
        stray = [n for n in self.entries if n.endswith(("_scale_inv", "weight_scale", "weight_shape"))]
        if stray:
            raise DataError(f"{self.path}: scale without its quantised weight: {_some(stray)}", "download it again")

    def config(self) -> dict[str, Any]:
        """config.json of the dequantised model."""
        return plain_config(self._folder.config())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised."""
        return self.read_rows(name, 0, self.entries[name].shape[0]) if name in self._packed else self._folder.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) along the first dimension, dequantised; only they and their scales are read."""
        if name not in self.entries:
            raise DataError(f"{self.path} has no tensor {name!r}", "check that the model is of the stated family")
        entry = self.entries[name]
        shape = (stop - start, *entry.shape[1:])
        if name not in self._packed:
            row = entry.nbytes // max(entry.shape[0], 1)
            return _bytes(entry, start * row, stop * row).view(entry.dtype).reshape(shape)
        packed = self._packed[name]
        self._check_stored_shape(name, packed)
        per_first = math.prod(entry.shape[1:-1])
        return self._values(packed, entry.shape, start * per_first, stop * per_first).reshape(shape)

    def iterate(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in file order, but for those to skip; one tensor alive at a time if the caller keeps none."""
        for name, _ in sorted(self.entries.items(), key=lambda kv: (kv[1].file.name, kv[1].offset)):
            if name not in skip:
                yield name, self.read(name)

    def _values(self, packed: _Packed, shape: tuple[int, ...], begin: int, end: int) -> torch.Tensor:
        """[end - begin, cols]: rows of the tensor seen as one matrix, whose matrices lie one under the other."""
        rows, cols = shape[-2], shape[-1]
        bands, groups = -(-rows // packed.per[0]), -(-cols // packed.per[1])
        out = torch.empty(end - begin, cols, dtype=LOGICAL)
        if not out.numel():
            return out

        def band_of(row: int | torch.Tensor) -> Any:
            return row // rows * bands + row % rows // packed.per[0]

        first, last = band_of(begin), band_of(end - 1) + 1
        size = packed.scale.dtype.itemsize * groups
        scales = _bytes(packed.scale, first * size, last * size).view(packed.scale.dtype).view(-1, groups).float()
        row_bytes = packed.weight.nbytes // (math.prod(shape) // cols)
        step = max(1, SLAB // cols)
        for low in range(begin, end, step):
            high = min(low + step, end)
            stored = _bytes(packed.weight, low * row_bytes, high * row_bytes)
            values = (decode_e4m3 if self.scheme.kind == "fp8" else decode_int4)(stored).view(high - low, cols)
            bands_here = band_of(torch.arange(low, high)) - first
            multiply_blocks(values, scales[bands_here], packed.per[1], out[low - begin : high - begin])
        return out

    def _pair(self) -> dict[str, _Packed]:
        """Logical name -> where its parts lie; every part is checked against the others."""
        pair = self._pair_fp8 if self.scheme.kind == "fp8" else self._pair_int4
        return dict(pair(name) for name in _quantised_names(self._folder))

    def _pair_fp8(self, name: str) -> tuple[str, _Packed]:
        entries = self._folder.entries
        weight = entries[name]
        if weight.dtype != E4M3 or len(weight.shape) < 2:
            raise DataError(f"{self.path}: {name} is {weight.dtype} {list(weight.shape)}, not an e4m3 matrix", READABLE)
        scale = self._scale_entry(name, (f"{name}_scale_inv", f"{name}_scale"))
        return name, _Packed(weight, scale, self._per(name, weight.shape, scale.shape))

    def _per(self, name: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns per scale, from the scale's shape."""
        rows, cols = shape[-2:]
        matrices = math.prod(shape[:-2])
        if self.scheme.block is not None:
            high, wide = self.scheme.block
            if scale == (*shape[:-2], -(-rows // high), -(-cols // wide)):
                return high, wide
        elif math.prod(scale) == matrices:
            return rows, cols
        elif math.prod(scale) == matrices * rows and (scale[-1:] in ((1,), (rows,))):
            return 1, cols
        block = f"blocks of {list(self.scheme.block)}" if self.scheme.block else "one scale per tensor or per row"
        raise DataError(
            f"{self.path}: scale of {name} has shape {list(scale)}, which does not fit {list(shape)} in {block}",
            f"download the model again, or correct {CONFIG_KEY} in config.json",
        )

    def _pair_int4(self, name: str) -> tuple[str, _Packed]:
        base = name.removesuffix("_packed")
        if not name.endswith(".weight_packed"):
            raise DataError(f"{self.path}: {name} is not an int4 weight (X.weight_packed)", READABLE)
        weight = self._folder.entries[name]
        scale = self._scale_entry(name, (f"{base}_scale",))
        shape_name = f"{base}_shape"
        if shape_name not in self._folder.entries:
            raise DataError(f"{self.path}: {name} lacks its {shape_name}", "download the model again")
        assert self.scheme.block is not None
        group = self.scheme.block[1]
        rows, cols = weight.shape[0], weight.shape[-1] * 8
        if len(weight.shape) != 2 or cols % group or scale.shape != (rows, cols // group):
            raise DataError(
                f"{self.path}: {name} {list(weight.shape)}, scales {list(scale.shape)}: no int4 in groups of {group}",
                f"download the model again, or correct {CONFIG_KEY} in config.json",
            )
        return base, _Packed(weight, scale, self.scheme.block, shape_name)

    def _scale_entry(self, name: str, candidates: tuple[str, ...]) -> TensorEntry:
        found = next((self._folder.entries[c] for c in candidates if c in self._folder.entries), None)
        if found is None:
            raise DataError(f"{self.path}: {name} lacks its {candidates[0]}", "download the model again")
        if found.dtype not in _SCALE_DTYPES:
            raise DataError(f"{self.path}: scale of {name} is {found.dtype}", READABLE)
        return found

    def _shape(self, packed: _Packed) -> tuple[int, ...]:
        shape = packed.weight.shape
        return (shape[0], shape[1] * 8) if packed.shape_name else shape

    def _check_stored_shape(self, name: str, packed: _Packed) -> None:
        if not packed.shape_name:
            return
        stated = tuple(self._folder.read(packed.shape_name).tolist())
        if stated != self.entries[name].shape:
            raise DataError(
                f"{self.path}: {packed.shape_name} says {list(stated)}, {name} holds {list(self.entries[name].shape)}",
                "download the model again",
            )


def _quantised_names(folder: HfFolder) -> list[str]:
    narrow = (E4M3, torch.float8_e5m2)
    return [n for n, e in folder.entries.items() if e.dtype in narrow or n.endswith("weight_packed")]


def _bytes(entry: TensorEntry, begin: int, end: int) -> torch.Tensor:
    """[end - begin] uint8: part of a tensor's bytes."""
    data = torch.empty(end - begin, dtype=torch.uint8)
    view: memoryview = data.numpy().data
    with entry.file.open("rb", buffering=0) as handle:
        handle.seek(entry.offset + begin)
        while len(view):
            count = handle.readinto(view)
            if not count:
                raise DataError(f"{entry.file} ends too early", "download the model again")
            view = view[count:]
    return data


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
