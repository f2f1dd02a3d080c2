"""Weights as flat buffers that other processes of this machine open by a handle: sync.kind = tensor.

A bucket, JSON-ready: {"handle": {...}, "nbytes": n, "tensors": [{"name", "dtype", "shape", "offset", "nbytes"}]}.
Handles: {"shm": path} of a file under /dev/shm (sync.shared_memory), or {"cuda": {...}}: what CUDA needs to open memory
of another process on the same device. The embedded engine takes this JSON; SGLang takes a pickle of the same
(sync.sglang_wire).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.sync import shared_memory

BUCKET_BYTES = 512 << 20
"""a device bucket is closed before it grows beyond this (bytes), unless one tensor alone is larger"""
CUDA_FIELDS = (
    "size", "stride", "offset", "device", "storage_handle", "storage_size_bytes", "storage_offset_bytes",
    "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""of torch's rebuild_cuda_tensor, in its order, classes, dtype and requires_grad left out; `device` is a UUID"""
Pairs = Iterable[tuple[str, torch.Tensor]]
_held: dict[str, list[torch.Tensor]] = {}
"""device buckets by run: they live until the run's next version is staged"""


def stage(pairs: Pairs, *, version: int, key: str) -> tuple[list[dict[str, Any]], Path | None, int]:
    """Lay all weights down; returns (buckets, manifest in shared memory if they are there, bytes)."""
    pairs = iter(pairs)
    first = next(pairs, None)
    whole: Iterator[tuple[str, torch.Tensor]] = pairs if first is None else chain([first], pairs)
    if first is None or not first[1].is_cuda:
        manifest, total = shared_memory.write(whole, version=version, key=key)
        return [of_manifest(manifest)], manifest, total
    _held.pop(key, None)
    packed = list(pack(whole, BUCKET_BYTES))
    _held[key] = [flat for flat, _ in packed]
    torch.cuda.synchronize()
    total = sum(entry["nbytes"] for _, entries in packed for entry in entries)
    made = [{"handle": {"cuda": cuda_handle(f)}, "nbytes": f.nbytes, "tensors": entries} for f, entries in packed]
    return made, None, total


def of_manifest(manifest: Path) -> dict[str, Any]:
    """The one bucket that a shared-memory manifest describes."""
    told: dict[str, Any] = files.read_json(manifest)
    path = Path(told["buffer"])
    return {"handle": {"shm": str(path)}, "nbytes": path.stat().st_size, "tensors": told["tensors"]}


def pack(pairs: Pairs, limit: int) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
    """[n] uint8 buffers of at most `limit` bytes on the tensors' device, and what lies in each."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        room = aligned(tensor.nbytes)
        if group and size + room > limit:
            yield _flat(group, size)
            group, size = [], 0
        group.append((name, tensor))
        size += room
    if group:
        yield _flat(group, size)


def _flat(group: list[tuple[str, torch.Tensor]], size: int) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    flat = torch.empty(size, dtype=torch.uint8, device=group[0][1].device)
    entries, offset = [], 0
    for name, tensor in group:
        octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[offset : offset + octets.numel()].copy_(octets)
        entries.append(shared_memory.entry(name, tensor, offset))
        offset += aligned(tensor.nbytes)
    return flat, entries


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next tensor may begin."""
    return -(-nbytes // shared_memory.ALIGN) * shared_memory.ALIGN


def cuda_handle(flat: torch.Tensor) -> dict[str, Any]:
    """What another process needs to open a device buffer, JSON-ready."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, args = reduce_tensor(flat)  # type: ignore[no-untyped-call]
    device = str(torch.cuda.get_device_properties(flat.device).uuid)
    return handle_of(args, device)


def handle_of(args: tuple[Any, ...], device: str) -> dict[str, Any]:
    """Arguments of torch's rebuild_cuda_tensor as JSON: bytes as base64, the device by its UUID."""
    _, size, stride, offset, _, _, _, *rest = args
    storage = rest[:3] + rest[4:]  # without requires_grad
    values = [list(size), list(stride), offset, device, *storage]
    return dict(zip(CUDA_FIELDS, map(_to_json, values), strict=True))


def cuda_values(handle: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of the JSON form: bytes are bytes again."""
    return {name: _from_json(handle[name]) for name in CUDA_FIELDS}


def _to_json(value: Any) -> Any:
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["b64"], validate=True) if isinstance(value, dict) else value
