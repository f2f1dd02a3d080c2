"""HF folders: safetensors read tensor by tensor and written as a stream, so that memory follows the largest tensor."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimecli import files, headers
from slimecli.errors import DataError
from slimecli.weights.fingerprint import Fingerprint

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors dtype name -> torch dtype"""
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
)
"""files that belong to a model besides its weights; nothing else is copied, so no pickle ever is"""
INDEX = headers.INDEX
HELD_BYTES = 64 << 20
"""a shard up to this size is held until its header is known; a larger one gets room for a header in advance"""
HEADER_ROOM = 1 << 20
"""header room of a large shard (bytes); a shard is closed early rather than overflow it"""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    offset: int
    """absolute byte offset in the file"""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Entries:
    """What can be told of tensors from where they lie."""

    entries: dict[str, TensorEntry]

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as read."""
        return sum(e.nbytes for e in self.entries.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, as read."""
        return {n: self.entries[n].shape for n in self.names}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> dtype, as read."""
        return {n: self.entries[n].dtype for n in self.names}


class HfFolder(Entries):
    """A folder of safetensors with everything checked that headers can tell. Opening it reads headers only."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"{path} is not a folder", "name a folder with config.json and *.safetensors")
        self._index = headers.read_index(self.path)
        self.entries: dict[str, TensorEntry] = {}
        for shard in headers.shard_paths(self.path, None if self._index is None else self._index.values()):
            for name, entry in read_header(shard).items():
                if name in self.entries:
                    where = f"{self.entries[name].file.name} and {shard.name}"
                    raise DataError(f"{self.path}: tensor {name} is in both {where}", "remove the stray shard")
                self.entries[name] = entry
        self._check_index()

    def _check_index(self) -> None:
        if self._index is None:
            return
        lost = sorted(n for n, f in self._index.items() if n not in self.entries or self.entries[n].file.name != f)
        stray = sorted(set(self.entries) - set(self._index))
        if lost or stray:
            parts = [f"in the index but not in its shard: {_some(lost)}"] if lost else []
            parts += [f"in a shard but not in the index: {_some(stray)}"] if stray else []
            raise DataError(f"{self.path / INDEX}: {'; '.join(parts)}", "download the model again")

    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_config(self.path)

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in its stored dtype; only its own bytes become resident."""
        if name not in self.entries:
            raise DataError(f"{self.path} has no tensor {name!r}", "check that the model is of the stated family")
        return read_entry(name, self.entries[name])

    def iterate(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in file order, but for those to skip; one tensor alive at a time if the caller keeps none."""
        for name, _ in sorted(self.entries.items(), key=lambda kv: (kv[1].file.name, kv[1].offset)):
            if name not in skip:
                yield name, self.read(name)


def read_entry(name: str, entry: TensorEntry) -> torch.Tensor:
    """One tensor from where it lies."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as handle:
        view: memoryview = data.numpy().data
        handle.seek(entry.offset)
        while len(view):
            count = handle.readinto(view)
            if not count:
                raise DataError(f"{entry.file} ends inside tensor {name}", "download the model again")
            view = view[count:]
    return data.view(entry.dtype).view(entry.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an HF folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"{folder} has no config.json", "name a complete HF model folder")
    config = files.read_json(path)
    if not isinstance(config, dict):
        raise DataError(f"{path} is no JSON object", "use the config.json that came with the weights")
    return config


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; a damaged or truncated one is a DataError."""
    start, header = headers.read_header(path)
    try:
        return {n: _entry(path, start, d) for n, d in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise headers.damaged_header(path, error) from None


def _entry(path: Path, start: int, data: dict[str, Any]) -> TensorEntry:
    begin, end = data["data_offsets"]
    dtype, shape = DTYPES[data["dtype"]], tuple(data["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {dtype}")
    return TensorEntry(path, start + begin, end - begin, dtype, shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in element order, without a copy for contiguous CPU tensors."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    view: memoryview = (flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)).data
    return view


def unfinished_shard(number: int) -> str:
    """What a shard is called before it is known how many there are."""
    return f"shard-{number:05d}"


def shard_name(number: int, count: int) -> str:
    """What it is called then."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


class _ShardWriter:
    """Appends tensors to numbered safetensors files under temporary names."""

    def __init__(self, out: Path, max_shard_bytes: int, on_shard: Callable[[int], None]) -> None:
        self.out, self.limit, self._on_shard = out, max_shard_bytes, on_shard
        self.shards: list[list[str]] = []
        self._header: dict[str, Any] = {}
        self._header_bytes = 0
        self._held: list[memoryview] = []
        self._size = 0
        self._handle: Any = None

    def take_up(self, begun: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What the first `begun` shards hold, which an earlier process has written."""
        for number in range(1, begun + 1):
            entries = read_header(self.out / unfinished_shard(number))
            self.shards.append(list(entries))
            yield from ((name, read_entry(name, entry)) for name, entry in entries.items())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        entry_bytes = len(name) + 128
        if self._header and (
            self._size + tensor.nbytes > self.limit or self._header_bytes + entry_bytes > HEADER_ROOM - 64
        ):
            self.close_shard()
        self._header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, self._size + tensor.nbytes],
        }
        self._header_bytes += entry_bytes
        self._size += tensor.nbytes
        data = tensor_bytes(tensor)
        if self._handle is None and self._size <= HELD_BYTES:
            # held bytes must not follow a tensor that its owner goes on changing
            self._held.append(memoryview(bytes(data)))
            return
        if self._handle is None:
            self._start(HEADER_ROOM)
        self._handle.write(data)

    def _start(self, room: int) -> None:
        self._handle = (self.out / unfinished_shard(len(self.shards) + 1)).open("wb")
        self._handle.seek(room)
        for data in self._held:
            self._handle.write(data)
        self._held = []

    def close_shard(self) -> None:
        """Write the header and start anew."""
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = HEADER_ROOM if self._handle else 8 + -(-len(text) // 8) * 8
        if self._handle is None:
            self._start(room)
        self._handle.seek(0)
        self._handle.write(struct.pack("<Q", room - 8) + text.ljust(room - 8))
        self._handle.flush()
        self._handle.close()
        self.shards.append(list(self._header))
        self._header, self._header_bytes, self._size, self._handle = {}, 0, 0, None
        self._on_shard(len(self.shards))

    def finish(self, total: int) -> dict[str, str]:
        """Close, give final names, write the index if there is more than one shard; returns name -> file."""
        if self._header or not self.shards:
            self.close_shard()
        count = len(self.shards)
        where = {}
        for number, names in enumerate(self.shards, 1):
            final = shard_name(number, count)
            (self.out / unfinished_shard(number)).replace(self.out / final)
            where.update(dict.fromkeys(names, final))
        if count > 1:
            files.write_json(self.out / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        return where

    def abandon(self) -> None:
        """Close the open file after a failure."""
        if self._handle is not None:
            self._handle.close()


def save_hf_folder(
    pairs: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    like: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    mark: Fingerprint | None = None,
    begun: int = 0,
    on_shard: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:
    """Write weights as they come, and copy what else belongs to the model from `like`.

    Args:
        pairs: (name, tensor) in the order they shall lie in the files; equal input gives equal bytes.
        out: existing or new folder; the caller commits it.
        like: HF folder with config and tokenizer.
        dtype: floating tensors are cast to it; None keeps each as it is.
        max_shard_bytes: largest shard (bytes), unless one tensor alone is larger.
        mark: takes in what is written, for who wants to know more of it than the fingerprint.
        begun: shards that lie in `out` as unfinished_shard(1), ...; `pairs` goes on after them.
        on_shard: told of each shard, by its number, once it is written.

    Returns {"tensors", "bytes", "shards", "dtype", "fingerprint"}.
    """
    out.mkdir(parents=True, exist_ok=True)
    mark = Fingerprint() if mark is None else mark
    total, count, kinds = 0, 0, set()
    writer = _ShardWriter(out, max_shard_bytes, on_shard)

    def written() -> Iterator[torch.Tensor]:
        for name, tensor in writer.take_up(begun):
            mark.update(name, tensor)
            yield tensor
        for name, tensor in pairs:
            tensor = tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            mark.update(name, tensor)
            writer.add(name, tensor)
            yield tensor

    try:
        for tensor in written():
            total, count = total + tensor.nbytes, count + 1
            kinds.add(str(tensor.dtype).removeprefix("torch."))
        where = writer.finish(total)
    finally:
        writer.abandon()
    kind = str(dtype).removeprefix("torch.") if dtype else (kinds.pop() if len(kinds) == 1 else None)
    copy_companions(like, out, dtype=kind)
    return {
        "tensors": count,
        "bytes": total,
        "shards": len(set(where.values())),
        "dtype": kind,
        "fingerprint": mark.hexdigest(),
    }


def copy_companions(like: Path, out: Path, dtype: str | None = None) -> list[str]:
    """Copy config, tokenizer and templates; `dtype` is noted in config.json. Returns the names copied."""
    copied = []
    for name in COMPANIONS:
        source = like / name
        if not source.is_file():
            continue
        copied.append(name)
        if name == "config.json" and dtype:
            config = files.read_json(source)
            config.pop("dtype", None)
            files.write_json(out / name, {**config, "torch_dtype": dtype})
        elif source.resolve() != (out / name).resolve():
            shutil.copyfile(source, out / name)
    # code of the model's own goes along, unrun: loading it still takes trust_remote_code
    for source in sorted(like.glob("*.py")):
        if source.resolve() != (out / source.name).resolve():
            shutil.copyfile(source, out / source.name)
            copied.append(source.name)
    templates = like / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)
    return copied


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
