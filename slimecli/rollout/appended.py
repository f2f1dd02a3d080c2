"""A file of JSON lines that grows by whole prompts and survives a kill: every prompt's lines are in it once.

Beside FILE stands `.FILE.progress.json`: how many bytes of the file are whole, and how many rows of the input they came
from. It is written after the lines are on the disk; what a kill leaves beyond it is cut off and made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from slimecli import files
from slimecli.errors import SlimeError, UsageError
from slimecli.rollout.eval_spec import differences

COMMIT_S = 2.0
"""longest time that finished prompts stay without being committed (seconds)"""
NO_ROWS = hashlib.sha256().hexdigest()


def chain(digest: str, line: bytes) -> str:
    """Hash of all rows up to this one, from the hash of those before it."""
    return hashlib.sha256(digest.encode() + line.strip()).hexdigest()


class AppendedFile:
    """The file, opened for the one process that writes it.

    Args:
        path: the JSONL file; made if missing. One that stands there without its progress file is refused.
        identity: what the lines depend on; a file that was begun with another one is refused.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", "name a file with --out, e.g. samples.jsonl")
        self.path = path
        self._progress_path = path.with_name(f".{path.name}.progress.json")
        self._identity = identity
        stored = files.read_json(self._progress_path) if self._progress_path.is_file() else None
        if stored is None and path.exists() and path.stat().st_size:
            raise UsageError(f"{path} exists and was not begun by slime rollout", "choose another --out file")
        if stored is not None and not path.exists():
            stored = None  # removed by hand: begun anew
        if stored is not None:
            self._refuse_other(stored["identity"])
        self.rows: int = stored["rows"] if stored else 0
        """rows of the input up to the last that was answered or left out"""
        self.digest: str = stored["digest"] if stored else NO_ROWS
        """`chain` over these rows"""
        self.counts: dict[str, int] = stored["counts"] if stored else {}
        """what became of them"""
        self.is_done: bool = bool(stored and stored["done"])
        with files.explain_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = path.open("ab")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._handle.close()
            raise SlimeError(f"{path} is being written by another process", "wait for it, or use --shard") from None
        self._cut(stored["bytes"] if stored else 0)
        self._last = time.monotonic()
        self._is_ahead = False
        """whether something was added after the last commit"""

    def __enter__(self) -> AppendedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._is_ahead:
                self.commit()
        finally:
            self._handle.close()

    def _refuse_other(self, begun: dict[str, Any]) -> None:
        found = differences(begun, self._identity)
        if found:
            told = "; ".join(f"{name}: {a!r}, now {b!r}" for name, a, b in found[:4])
            raise UsageError(
                f"{self.path} was begun with other values: {told}",
                f"go on with the old ones, choose another --out, or remove {self.path}",
            )

    def _cut(self, size: int) -> None:
        """Forget what a killed writer left beyond its last commit."""
        if self.path.stat().st_size < size:
            raise SlimeError(
                f"{self.path} is shorter than it was ({self.path.stat().st_size} of {size} bytes)",
                f"restore it from a copy, or remove it and {self._progress_path} to begin anew",
            )
        os.ftruncate(self._handle.fileno(), size)

    def add(self, lines: list[str], rows: int, digest: str, counts: dict[str, int]) -> None:
        """The lines of one prompt, and where the input stands after it."""
        with files.explain_disk_errors(self.path):
            self._handle.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
        self.rows, self.digest, self.counts, self._is_ahead = rows, digest, counts, True
        if time.monotonic() - self._last > COMMIT_S:
            self.commit()

    def commit(self, *, done: bool = False) -> None:
        """Make what was added durable, then say so."""
        self.is_done = self.is_done or done
        with files.explain_disk_errors(self.path):
            self._handle.flush()
            os.fsync(self._handle.fileno())
            size = os.fstat(self._handle.fileno()).st_size
        files.write_json(
            self._progress_path,
            {
                "identity": self._identity,
                "bytes": size,
                "rows": self.rows,
                "digest": self.digest,
                "counts": self.counts,
                "done": self.is_done,
            },
        )
        self._last, self._is_ahead = time.monotonic(), False
