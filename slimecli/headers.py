"""What a model folder holds, judged from names, sizes and headers: no weights are read, no torch."""

from __future__ import annotations

import json
import shlex
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.errors import DataError

INDEX = "model.safetensors.index.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""names the iteration to load of a Megatron checkpoint (torch_dist)"""
HF_FILES = "hf"
"""folder in a Megatron checkpoint with config and tokenizer, so that the way back needs nothing else"""
MAX_HEADER = 100_000_000
"""largest safetensors header (bytes), as the format's own reader has it"""
_AGAIN = "download the file again"


def is_torch_dist(folder: Path) -> bool:
    """Whether this is a Megatron checkpoint, or one of its iterations."""
    return (folder / TRACKER).is_file() or (folder / ".metadata").is_file()


def config_folder(folder: Path) -> Path:
    """Where config and tokenizer of a model folder lie: in itself, or what slime put beside a Megatron checkpoint."""
    places = (folder / HF_FILES, folder.parent / HF_FILES) if is_torch_dist(folder) else ()
    return next((place for place in places if (place / "config.json").is_file()), folder)


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name as the folder's index has it; None without an index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    index = files.read_json(path)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise DataError(f"{path} has no `weight_map` of tensor and file names", _AGAIN)
    return found


def shard_paths(folder: Path, indexed: Collection[str] | None = None) -> list[Path]:
    """The files that hold a folder's weights.

    Args:
        indexed: file names that the folder's index tells of; None: it has no index, and every file counts.
    """
    if indexed is not None:
        shards = [folder / name for name in sorted(set(indexed))]
        missing = [s.name for s in shards if not s.is_file()]
        if missing:
            raise DataError(f"{folder}: missing shard(s) {', '.join(missing)}", "download the model again")
        return shards
    shards = sorted(folder.glob("*.safetensors"))
    if not shards and is_torch_dist(folder):
        raise DataError(
            f"{folder} is a Megatron checkpoint (torch_dist), and an HF folder is wanted",
            shlex.join(["slime", "convert", "--from", str(folder), "--to", "hf", "--out", f"{folder}-hf"]),
        )
    if not shards:
        other = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
        also = f" (only {', '.join(other[:3])}: pickled weights are not read)" if other else ""
        raise DataError(f"{folder} has no *.safetensors{also}", "use a model saved as safetensors")
    return shards


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """(bytes before the first tensor, tensor name -> {"dtype", "shape", "data_offsets"}) of one safetensors file.

    A file whose size is not what its header says is a DataError.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = handle.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, MAX_HEADER):
            raise DataError(f"{path} is truncated: {size} bytes do not hold its header", _AGAIN)
        raw = handle.read(length)
    start = 8 + length
    try:
        header: dict[str, Any] = dict(json.loads(raw))
        header.pop("__metadata__", None)
        end = start + max((int(d["data_offsets"][1]) for d in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged_header(path, error) from None
    if end != size:
        raise DataError(f"{path} has {size} bytes, its header tells of {end}", _AGAIN)
    return start, header


def damaged_header(path: Path, error: Exception) -> DataError:
    """What is raised where a header can be read and makes no sense."""
    return DataError(f"{path} has a damaged safetensors header: {error}", _AGAIN)
