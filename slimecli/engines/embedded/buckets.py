"""Buckets of sync.kind = tensor, opened: JSON that names memory of this machine or device; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded.config import DTYPES
from slimecli.engines.embedded.weights import Header, WeightsRefused
from slimecli.sync import shared_memory
from slimecli.sync.buckets import cuda_values

Pairs = Iterator[tuple[str, torch.Tensor]]


def open_bucket(bucket: Mapping[str, Any]) -> tuple[list[Header], Pairs]:
    """Headers of a bucket, and views into it that are valid while they are iterated."""
    try:
        handle, size, entries = dict(bucket["handle"]), int(bucket["nbytes"]), list(bucket["tensors"])
        headers = [(str(e["name"]), tuple(e["shape"]), str(e["dtype"])) for e in entries]
        wild = [e["name"] for e in entries if not 0 <= e["offset"] <= e["offset"] + e["nbytes"] <= size]
        wrong = [n for n, _, dtype in headers if dtype not in DTYPES]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsRefused(f"not a bucket of weights: {error!r}", "send what sync.buckets makes") from None
    if wild or wrong:
        what = f"{wild[0]} lies outside its bucket" if wild else f"{wrong[0]} has a dtype this engine does not take"
        raise WeightsRefused(what, "stage the weights again")
    opener = _from_device if "cuda" in handle else _from_file
    return headers, _views(lambda: opener(handle, size), entries)


def _views(open_flat: Any, entries: list[Mapping[str, Any]]) -> Pairs:
    flat = open_flat()
    for entry in entries:
        part = flat[entry["offset"] : entry["offset"] + entry["nbytes"]]
        yield entry["name"], part.view(DTYPES[entry["dtype"]]).view(entry["shape"])


def _from_file(handle: Mapping[str, Any], size: int) -> torch.Tensor:
    """[size] uint8: a file under /dev/shm and nowhere else: who may talk to the engine must not choose its files."""
    path = Path(str(handle.get("shm", "")))
    if path.parent != shared_memory.SHM or not path.is_file() or path.is_symlink():
        raise WeightsRefused(f"{path} is no buffer under {shared_memory.SHM}", "stage the weights on this machine")
    if path.stat().st_size < size:
        raise WeightsRefused(f"{path} is shorter than its bucket", "stage the weights again")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _from_device(handle: Mapping[str, Any], size: int) -> torch.Tensor:
    """[size] uint8: device memory of another process, which must hold it meanwhile."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    try:
        value = cuda_values(handle["cuda"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsRefused(f"not a device handle: {error!r}", "send what sync.buckets makes") from None
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if value["device"] not in devices:
        raise WeightsRefused(
            f"the weights are on device {value['device']}, which this engine does not see",
            "put trainer and engine on the same devices, or --set sync.kind=shared_memory",
        )
    flat: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, torch.Size(value["size"]), tuple(value["stride"]), value["offset"], torch.UntypedStorage,
        torch.uint8, devices[value["device"]], value["storage_handle"], value["storage_size_bytes"],
        value["storage_offset_bytes"], False, value["ref_counter_handle"], value["ref_counter_offset"],
        value["event_handle"], value["event_sync_required"],
    )  # fmt: skip
    return flat[:size]
