"""Buckets in the form SGLang opens: a pickle of {"flattened_tensor", "metadata"} for load_format flattened_bucket.

The pickle is written opcode by opcode: it names SGLang's and torch's own rebuild functions, so that neither SGLang nor
the tensor has to be in the process that writes it. SGLang 0.5.21 admits these names (SafeUnpickler). What slime itself
opens is the JSON form, never this one.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli.sync import shared_memory
from slimecli.sync.buckets import cuda_values

_REDUCTIONS = "torch.multiprocessing.reductions"


@dataclass(frozen=True)
class Name:
    """A class or function, by module and name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What comes out of calling `function`."""

    function: Name
    arguments: tuple[Any, ...]


_BYTES = Name("torch", "uint8")
_TENSOR = Name("torch", "Tensor")
_META = Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


@contextlib.contextmanager
def offered(bucket: Mapping[str, Any]) -> Iterator[str]:
    """One bucket as SGLang's `serialized_named_tensors` wants it, per rank; valid within the block.

    A buffer in shared memory is offered under a name of its own: torch has a helper process that removes the names its
    process has opened when that process dies, and other engines read the same buffer.
    """
    handle = bucket["handle"]
    if "cuda" in handle:
        yield serialized(bucket)
        return
    path = Path(handle["shm"])
    link = path.with_name(f"{path.stem.rpartition('-')[0]}-{secrets.token_hex(4)}{path.suffix}")
    os.link(path, link)
    try:
        yield serialized({**bucket, "handle": {"shm": str(link)}})
    finally:
        link.unlink(missing_ok=True)


def serialized(bucket: Mapping[str, Any]) -> str:
    """Base64 of the pickle of a bucket."""
    handle = bucket["handle"]
    flat = _from_cuda(handle["cuda"]) if "cuda" in handle else _from_file(Path(handle["shm"]), bucket["nbytes"])
    first = 0 if "cuda" in handle else shared_memory.HEADER
    metadata = [_metadata(entry, first) for entry in bucket["tensors"]]
    return base64.b64encode(pickled({"flattened_tensor": flat, "metadata": metadata})).decode()


def _metadata(entry: Mapping[str, Any], first: int) -> Call:
    start = entry["offset"] - first
    shape = Call(Name("torch", "Size"), (list(entry["shape"]),))
    count = entry["nbytes"]
    return Call(_META, (entry["name"], shape, Name("torch", entry["dtype"]), start, start + count, count))


def _from_file(path: Path, nbytes: int) -> Call:
    """A buffer of sync.shared_memory as torch's shared storage: its header is torch's reference count."""
    size = nbytes - shared_memory.HEADER
    name = b"/" + path.name.encode()
    storage = Call(
        Name(_REDUCTIONS, "rebuild_storage_filename"), (Name("torch.storage", "UntypedStorage"), b"", name, size)
    )
    typed = Call(Name(_REDUCTIONS, "rebuild_typed_storage"), (storage, _BYTES))
    return Call(Name(_REDUCTIONS, "rebuild_tensor"), (_TENSOR, typed, (0, (size,), (1,), False)))


def _from_cuda(handle: Mapping[str, Any]) -> Call:
    value = cuda_values(handle)
    storage = ("storage_handle", "storage_size_bytes", "storage_offset_bytes")
    counters = ("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
    arguments = (
        _TENSOR, tuple(value["size"]), tuple(value["stride"]), value["offset"],
        Name("torch.storage", "UntypedStorage"), _BYTES, value["device"],
        *(value[k] for k in storage), False, *(value[k] for k in counters),
    )  # fmt: skip
    return Call(Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"), arguments)


def pickled(value: Any) -> bytes:
    """A pickle of protocol 4."""
    return b"\x80\x04" + _encoded(value) + b"."


def _encoded(value: Any) -> bytes:
    if isinstance(value, Name):
        return _encoded(value.module) + _encoded(value.name) + b"\x93"
    if isinstance(value, Call):
        return _encoded(value.function) + _encoded(value.arguments) + b"R"
    if isinstance(value, dict):
        return b"}(" + b"".join(_encoded(k) + _encoded(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_encoded, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_encoded, value)) + b"t"
    return _plain(value)


def _plain(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + struct.pack("<B", len(raw)) + raw
    if isinstance(value, str):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw
    assert isinstance(value, bytes), type(value)
    return b"B" + struct.pack("<I", len(value)) + value
