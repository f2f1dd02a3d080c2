"""Weights in one file under /dev/shm, with a JSON manifest that says which bytes are which tensor.

Manifest: {"buffer": path, "version": int, "tensors": [{"name", "dtype", "shape", "offset", "nbytes"}]}.
One buffer per process and run is written over at every version, which spares the kernel from clearing new pages;
engines copy out of it during the update call. Names carry the process id, so that a dead process's files are found.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.weights.hf import tensor_bytes

SHM = Path("/dev/shm")
ALIGN = 64
"""tensors begin at multiples of this (bytes)"""
HEADER = 64
"""bytes before the first tensor: torch, which SGLang opens the buffer with, keeps a reference count there"""
COUNT = 1 << 30
"""so many readers short of zero, at which torch would remove the buffer"""
_NAME = re.compile(r"slime-(\d+)-(\d+)-[0-9a-f]+\.(bin|json)")
_ours: set[Path] = set()


def write(pairs: Iterable[tuple[str, torch.Tensor]], *, version: int, key: str) -> tuple[Path, int]:
    """Fill the buffer; returns (manifest, bytes). Everything is iterated even if it does not fit."""
    if not SHM.is_dir():
        raise SlimeError(f"this system has no {SHM}", "--set sync.kind=disk")
    _clean_once()
    stem = f"slime-{_namespace()}-{os.getpid()}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    buffer, manifest = SHM / f"{stem}.bin", SHM / f"{stem}.json"
    _ours.update((buffer, manifest))
    # A reader of an older manifest must not find it while the bytes change under it.
    manifest.unlink(missing_ok=True)
    tensors: list[dict[str, Any]] = []
    end, total, full = HEADER, 0, False
    with _open_private(buffer) as handle:
        full = not _write_at(handle.fileno(), 0, memoryview(COUNT.to_bytes(4, "little").ljust(HEADER, b"\0")))
        for name, tensor in pairs:
            start = -(-end // ALIGN) * ALIGN
            end, total = start + tensor.nbytes, total + tensor.nbytes
            tensors.append(entry(name, tensor, start))
            full = full or not _write_at(handle.fileno(), start, tensor_bytes(tensor))
        if not full:
            handle.truncate(end)
    if full:
        free = shutil.disk_usage(SHM).free
        remove(buffer)
        raise SlimeError(
            f"the weights take {end / 1e9:.2f} GB, {SHM} has {free / 1e9:.2f} GB left",
            "give it more (docker run --shm-size=...), or --set sync.kind=disk",
        )
    files.write_text(manifest, json.dumps({"buffer": str(buffer), "version": version, "tensors": tensors}))
    return manifest, total


def entry(name: str, tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    """Where one tensor lies in a buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset, "nbytes": tensor.nbytes}


def _open_private(path: Path) -> BinaryIO:
    """Open or make a file that no other user can read, and that no link of theirs stands in for."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b", buffering=0)


def _write_at(fd: int, offset: int, data: memoryview) -> bool:
    """Write all of data; False when the file system is full."""
    while len(data):
        try:
            count = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        data, offset = data[count:], offset + count
    return True


def release_at_exit(manifest: Path) -> None:
    """Have this process, too, remove the files at its end: a trainer that is killed cannot."""
    _ours.update((manifest, manifest.with_suffix(".bin")))


def remove(path: Path) -> None:
    """Remove one of our files, if it is still there and ours to remove."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        path.unlink()


@atexit.register
def release() -> None:
    """Remove every buffer and manifest that this process wrote or took over."""
    while _ours:
        remove(_ours.pop())


@cache
def _clean_once() -> None:
    """Remove what dead processes left, once per process."""
    for path in SHM.glob("slime-*"):
        match = _NAME.fullmatch(path.name)
        if match and int(match.group(1)) == _namespace() and not files.is_alive(int(match.group(2))):
            remove(path)


def _namespace() -> int:
    """Process ids mean something within one namespace only; containers may share /dev/shm."""
    return Path("/proc/self/ns/pid").stat().st_ino
