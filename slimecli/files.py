"""Files that are either whole or absent: write to a temporary name, flush to disk, rename."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slimecli.errors import DataError, SlimeError, UsageError

DONE = "DONE.json"
"""last file written into a committed folder; a folder without it does not exist"""


ABANDONED_S = 60.0
"""seconds without a change after which what a process left behind that is gone here is nobody's (a shared disk may be
written by other machines, whose processes cannot be asked)"""
_LEFTOVER = re.compile(r"\.(\d+)\.(tmp|old)")


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_RESTORE = "restore the file from a copy; what depends on it cannot go on without it"


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a SlimeError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(existing_parent(path)).free
            raise SlimeError(
                f"disk full while writing {path} ({free / 1e9:.2f} GB free)",
                "free space, or write to another disk (SLIME_RUNS moves runs); what was committed before is intact",
            ) from error
        if error.errno == errno.EFBIG:
            raise SlimeError(
                f"{path}: a file grew beyond what the file system or `ulimit -f` allows",
                "raise the limit, or write to another file system",
            ) from error
        if error.errno == errno.EISDIR:
            raise UsageError(f"{path} is a folder", "name a file") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UsageError(f"{path}: a part of this path is a file, not a folder", "name another folder") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise SlimeError(
                f"no permission to write {path}: {error.strerror}", "choose a folder that you can write to"
            ) from error
        raise


def existing_parent(path: Path) -> Path:
    """The nearest ancestor that exists."""
    while not path.exists():
        path = path.parent
    return path


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically, and so that it outlasts a power cut, unless `durable` is off: for what a new start makes
    anew. Waiting for the disk may take seconds."""
    write_parts(path, [data], durable=durable)


def write_parts(path: Path, parts: Iterable[bytes], *, durable: bool = True) -> None:
    """write_bytes of what need not be in memory as a whole."""
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as handle:
                handle.writelines(parts)
                handle.flush()
                if durable:
                    os.fsync(handle.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"), durable=durable)


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write JSON atomically, keys sorted."""
    write_text(path, json.dumps(data, indent=2, sort_keys=True) + "\n", durable=durable)


def read_json(path: Path) -> Any:
    """Read JSON; a broken file is named with line and column."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: {error.msg}", _RESTORE) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", _RESTORE) from None


@contextlib.contextmanager
def committed_folder(final: Path, manifest: dict[str, Any] | None = None, *, durable: bool = True) -> Iterator[Path]:
    """A folder that appears whole or not at all.

    Yields a temporary sibling to fill; on success DONE.json (the manifest, plus file names and sizes) is written
    last and the folder takes its final name, replacing an older one. On failure nothing is left; what a killed
    process left of the same folder goes with the next one. `durable` is as in write_bytes.
    """
    final = final.resolve() if final.is_symlink() else final  # the folder that the link stands for
    _drop_abandoned(final, "tmp")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with explain_disk_errors(final):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            commit_folder(temporary, final, manifest, durable=durable)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _drop_abandoned(final: Path, kind: str) -> None:
    """Remove what killed processes left of earlier tries at a folder."""
    for path in final.parent.glob(f".{glob.escape(final.name)}.*"):
        match = _LEFTOVER.fullmatch(path.name.removeprefix(f".{final.name}"))
        if match is None or match[2] != kind or is_alive(int(match[1])):
            continue
        last = max((p.stat().st_mtime for p in [path, *_files(path)]), default=0.0)
        if time.time() - last > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this number is there, in this process's namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def commit_folder(
    temporary: Path, final: Path, manifest: dict[str, Any] | None = None, *, durable: bool = True
) -> None:
    """Flush a finished folder to disk, write its DONE.json, and give it its final name, replacing an older one.

    Files that end in `.journal` belong to the way there: DONE.json leaves them out.
    """
    sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in _files(temporary) if p.suffix != ".journal"}
    if durable:
        _flush(temporary)
    write_json(temporary / DONE, {**(manifest or {}), "files": sizes}, durable=durable)
    if final.exists():
        old = final.with_name(f".{final.name}.{os.getpid()}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        try:
            temporary.rename(final)
        except BaseException:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
    _drop_abandoned(final, "old")
    if durable:
        sync_folder(final.parent)


def flush_file(path: Path) -> None:
    """What was written to a file, to disk."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _flush(folder: Path) -> None:
    """All files below a folder to disk, then the folders that name them."""
    for path in _files(folder):
        flush_file(path)
    for path in sorted(p for p in folder.rglob("*") if p.is_dir()):
        sync_folder(path)


def is_committed(folder: Path) -> bool:
    """True when the folder was written to its end and every file still has the size it had then.

    One whose DONE.json is damaged (a power cut, a copy that was cut short) counts as never written: it is made again.
    """
    return (folder / DONE).is_file() and not damage(folder)


def damage(folder: Path) -> str:
    """What has happened to a folder after it was complete; empty: nothing, or it never was."""
    done = folder / DONE
    if not done.is_file():
        return ""
    try:
        manifest = read_json(done)
    except DataError as error:
        return error.what
    if not isinstance(manifest, dict):
        return f"{DONE} is no JSON object"
    for name, size in manifest.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            return f"{name} is gone"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not the {size:,} it was written with"
    return ""


def sha256(path: Path) -> str:
    """Hex digest of a file, or of a folder (names and contents, sorted; DONE.json left out)."""
    digest = hashlib.sha256()
    if path.is_dir():
        for item in _files(path):
            if item.name != DONE:
                digest.update(f"{item.relative_to(path)}\0{sha256(item)}\0".encode())
        return digest.hexdigest()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


_LOOKS, _LOOK = 64, 1 << 16


def glance(path: Path) -> str:
    """Hex digest of a file's size and of 64 places in it, its ends among them (64 KiB each).

    Of many GB, whose whole hash takes a minute, that is enough to tell weights from those that were trained further.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        for place in sorted({max(size - _LOOK, 0) * look // (_LOOKS - 1) for look in range(_LOOKS)}):
            handle.seek(place)
            digest.update(handle.read(_LOOK))
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())
