"""Trainer state on disk: one safetensors file per rank with its shards, and one JSON index. Loads at any world size.

Not torch.distributed.checkpoint, whose metadata file is a pickle: a checkpoint may come from elsewhere, and nothing
here can run code. Tensors are cut along their first dimension only, as FSDP2 does, so a shard is a range of rows.

    rank_00000.safetensors   KIND/NAME -> local rows; KIND in weight, exp_avg, exp_avg_sq
    state.json               {"format", "step", "world_size",
                              "tensors": {KIND/NAME: {"shape", "dtype", "rows": [[file, start, stop]]}}}

There is no RNG state: what might be random in a step is seeded by (run seed, step), never by process history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimecli import files
from slimecli.errors import DataError
from slimecli.trainers._parallel import local

FORMAT = "slime-trainer-1"


def save_state(folder: Path, tensors: Mapping[str, Tensor], step: int, rank: int, world: int) -> None:
    """Write this rank's rows; rank 0 writes the index. Collective.

    Args:
        tensors: KIND/NAME -> tensor, plain (whole on every rank) or sharded.
        step: optimizer steps made.
    """
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ranges = [_rows(tensor, r, world) for r in range(world)]
        if not _sharded(tensor):
            ranges[1:] = [(0, 0)] * (world - 1)
        start, stop = ranges[rank]
        if stop > start:
            kept[name] = local(tensor).detach().cpu().contiguous()
        index[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "rows": [[_file(r), a, b] for r, (a, b) in enumerate(ranges) if b > a],
        }
    save_file(kept, folder / _file(rank))
    if rank == 0:
        files.write_json(folder / "state.json", {"format": FORMAT, "step": step, "world_size": world, "tensors": index})
    if world > 1:
        torch.distributed.barrier()


def load_state(folder: Path, tensors: Mapping[str, Tensor], rank: int, world: int) -> int:
    """Fill `tensors` in place from a checkpoint of any world size; returns the number of optimizer steps made."""
    path = folder / "state.json"
    if not path.is_file():
        raise DataError(f"{folder} is no trainer checkpoint: it has no state.json", "resume from another checkpoint")
    index = files.read_json(path)
    if index.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {index.get('format')!r}, expected {FORMAT!r}", "load it with the slime that wrote it"
        )
    stored = index["tensors"]
    different = sorted(set(tensors) ^ set(stored))
    if different:
        where = "the checkpoint lacks" if different[0] in tensors else "this model has no"
        raise DataError(f"{folder}: {where} {different[0]} ({len(different)} such)", "resume with the run's own model")
    with _Shards(folder) as shards:
        for name, tensor in tensors.items():
            if list(tensor.shape) != stored[name]["shape"]:
                raise DataError(
                    f"{folder}: {name} has shape {stored[name]['shape']}, the model's is {list(tensor.shape)}",
                    "resume with the run's own model",
                )
            start, stop = _rows(tensor, rank, world)
            target = local(tensor.detach())
            for file, a, b in stored[name]["rows"]:
                low, high = max(a, start), min(b, stop)
                if low < high:
                    target[low - start : high - start].copy_(shards.rows(file, name, low - a, high - a))
    return int(index["step"])


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of the weights in a checkpoint."""
    stored = files.read_json(folder / "state.json")["tensors"]
    return {k.removeprefix("weight/"): tuple(v["shape"]) for k, v in stored.items() if k.startswith("weight/")}


def stored_weights(folder: Path, skip: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of the weights in a checkpoint but those to skip, in name order; one alive at a time."""
    stored = files.read_json(folder / "state.json")["tensors"]
    with _Shards(folder) as shards:
        for key in sorted(k for k in stored if k.startswith("weight/") and k.removeprefix("weight/") not in skip):
            entry = stored[key]
            tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            for file, start, stop in entry["rows"]:
                tensor[start:stop] = shards.rows(file, key, 0, stop - start)
            yield key.removeprefix("weight/"), tensor


class _Shards:
    """The open files of a checkpoint; a missing or torn one is named."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"{self._folder / file} cannot be read: {error}", "resume from another checkpoint"
                ) from None
        return self._open[file]

    def rows(self, file: str, name: str, start: int, stop: int) -> Tensor:
        if name not in set(self._handle(file).keys()):
            raise DataError(f"{self._folder / file} lacks {name}", "resume from another checkpoint")
        rows: Tensor = self._handle(file).get_slice(name)[start:stop]
        return rows


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _rows(tensor: Tensor, rank: int, world: int) -> tuple[int, int]:
    """[start, stop) of the rows that a rank holds: FSDP2's even chunks, or all of a plain tensor."""
    rows = tensor.shape[0]
    if not _sharded(tensor):
        return 0, rows
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)
