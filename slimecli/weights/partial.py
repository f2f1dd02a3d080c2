"""The unfinished result of a conversion or an export: `OUT.partial/`, with a journal of what is in it for good.

A task (of an export: a whole shard) enters the journal after its bytes were flushed to disk. A later run with the same
source and options goes on with the rest; with others it starts over. Of a conversion it first reads those bytes again
and compares them with the journal's digest; an export compares its whole result with the source at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slimecli import console, files
from slimecli.errors import DataError, InterruptedRunError, SlimeError, UsageError
from slimecli.weights.direct import DiskFile
from slimecli.weights.meter import Meter
from slimecli.weights.pipeline import Carrier, Packer, Task, Workers

JOURNAL = "convert.journal"
SYNC_BYTES = 256 << 20
"""bytes between two entries in the journal: what an interruption costs at most, per disk flush"""


class Partial:
    """OUT.partial, open for writing by this process alone.

    Args:
        final: where the result goes.
        identity: source and options as JSON; the folder of another identity is of no use.
        command: who writes, for messages.
    """

    def __init__(self, final: Path, identity: dict[str, Any], command: str = "slime convert") -> None:
        self.final = final.resolve() if final.is_symlink() else final  # the folder that the link stands for
        self.folder = self.final.with_name(f"{self.final.name}.partial")
        self._identity = json.loads(json.dumps(identity))
        self.done: dict[int, str] = {}
        """task -> digest (of an export: file name), of all that is on disk for good"""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(self.folder / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._journal)
            raise UsageError(
                f"another `{command}` is writing {self.folder}", "wait for it, or name another --out"
            ) from None
        self._files: list[DiskFile] = []
        self._open_journal()

    def _open_journal(self) -> None:
        lines = (self.folder / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        if entries and (differing := _differences(entries[0], self._identity)):
            console.note(f"{self.folder} was begun with another {', '.join(differing)}: starting over")
            entries = []
        if not entries:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    _remove(path)
            os.ftruncate(self._journal, 0)
            self._append([self._identity])
            return
        # a line cut short by a crash must not run into the next one
        os.ftruncate(self._journal, sum(len(line.encode()) for line in lines if line.endswith("\n")))
        self.done = dict(entries[1:])

    def _append(self, entries: list[Any]) -> None:
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)
        os.write(self._journal, text.encode())
        os.fsync(self._journal)

    def write(self, plan: Packer, carrier: Carrier, workers: Workers) -> int:
        """Do the tasks that are not done; returns how many bytes an earlier run had written.

        Raises SlimeError when interrupted or when the disk is full; what was flushed is kept.
        """
        self.keep_only(name for name, _ in plan.files)
        self._check_space(plan)
        for name, size in plan.files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.append(DiskFile(self.folder / name, size))
        reused = self._reuse(plan, carrier, workers)
        rest = [task for task in plan.tasks if task.number not in self.done]
        meter = Meter("write", sum(size for _, size in plan.files), reused)

        def do(task: Task) -> str:
            out = workers.buffer(task.size, task.offset)
            digest = carrier.fill(task, out)
            self._files[task.file].write(task.offset, out)
            return digest

        pending: list[tuple[Task, str]] = []
        try:
            with meter, contextlib.closing(workers.each(rest, do)) as done:
                for task, digest in done:
                    pending.append((task, digest))
                    meter.advance(task.size)
                    if sum_of(pending) >= SYNC_BYTES:
                        self._keep(pending)
            self._keep(pending)
        except KeyboardInterrupt:
            self._keep(pending)
            raise
        return reused

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove all other files: those written last are small and made anew, and a kill may have left half of one."""
        known = {self.folder / name for name in (*names, JOURNAL)}
        for path in [p for p in self.folder.rglob("*") if p.is_file() and p not in known]:
            path.unlink()

    def note(self, number: int, name: str) -> None:
        """Enter a task that has written a file of its own to the end."""
        files.flush_file(self.folder / name)
        self._append([[number, name]])
        self.done[number] = name

    def _check_space(self, plan: Packer) -> None:
        needed = sum(size for _, size in plan.files)
        there = sum(p.stat().st_blocks * 512 for p in self.folder.rglob("*") if p.is_file())
        free = shutil.disk_usage(self.folder).free
        if needed - there > free:
            raise SlimeError(
                f"{self.final} takes {_gb(needed - there)}, but only {_gb(free)} are free on its disk",
                "free space, or name an --out on another disk",
            )

    def _reuse(self, plan: Packer, carrier: Carrier, workers: Workers) -> int:
        """Compare what an earlier run wrote with its journal; what does not agree is done again."""
        tasks = [task for task in plan.tasks if task.number in self.done]

        def check(task: Task) -> bool:
            out = workers.buffer(task.size)
            self._files[task.file].read(task.offset, out)
            return carrier.is_filled(task, out, self.done[task.number])

        reused, meter = 0, Meter("check what is there", sum(task.size for task in tasks))
        with meter, contextlib.closing(workers.each(tasks, check)) as checked:
            for task, good in checked:
                meter.advance(task.size)
                if good:
                    reused += task.size
                else:
                    del self.done[task.number]
        if reused:
            console.note(f"continuing: {_gb(reused)} of {_gb(sum(s for _, s in plan.files))} were written before")
        return reused

    def _keep(self, pending: list[tuple[Task, str]]) -> None:
        """Flush the files of these tasks and enter the tasks in the journal."""
        for file in {task.file for task, _ in pending}:
            self._files[file].flush()
        if pending:
            self._append([[task.number, digest] for task, digest in pending])
            self.done |= {task.number: digest for task, digest in pending}
        pending.clear()

    def forget_cache(self) -> None:
        """Have what is read again read from the disk, also where it went through the system's cache."""
        for file in self._files:
            file.forget_cache()

    def commit(self, notes: dict[str, Any]) -> None:
        """Give the folder its final name."""
        files.commit_folder(self.folder, self.final, notes)
        (self.final / JOURNAL).unlink()

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the files and let others write."""
        while self._files:
            self._files.pop().close()
        os.close(self._journal)


@contextlib.contextmanager
def partial_folder(final: Path, identity: dict[str, Any], command: str = "slime convert") -> Iterator[Partial]:
    """OUT.partial: kept where a later run can go on with it, removed where it is of no use."""
    with files.explain_disk_errors(final):
        partial = Partial(final, identity, command)
        try:
            yield partial
        except BaseException as error:
            if isinstance(error, DataError) or not partial.done:
                partial.discard()
            _explain(error, partial)
            raise
        finally:
            partial.close()


def _explain(error: BaseException, partial: Partial) -> None:
    """Say what became of the work when it was stopped from outside."""
    kept = f"what was done is kept in {partial.folder}" if partial.done else "nothing had been written yet"
    if isinstance(error, KeyboardInterrupt):
        raise InterruptedRunError(f"interrupted; {kept}", "the same command again continues") from None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise SlimeError(
            f"disk full while writing {partial.final}; {kept}", "free space, then run the same command: it continues"
        ) from error


def finished(final: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What DONE.json says if this very conversion has been done; refuses to touch a folder that is no conversion."""
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return None
    done = final / files.DONE
    notes: dict[str, Any] = files.read_json(done) if done.is_file() else {}
    if "identity" not in notes:
        raise UsageError(f"{final} exists and is no result of `slime convert`", "name another --out, or remove it")
    made_from, source = (", ".join(i["source"]) for i in (notes["identity"], identity))
    if made_from != source:
        raise UsageError(f"{final} holds a conversion of {made_from}", "name another --out, or remove it")
    if notes["identity"] == json.loads(json.dumps(identity)) and files.is_committed(final):
        (final / JOURNAL).unlink(missing_ok=True)
        return notes
    return None


def sum_of(pending: list[tuple[Task, str]]) -> int:
    """Bytes of these tasks."""
    return sum(task.size for task, _ in pending)


def _differences(before: Any, now: dict[str, Any]) -> list[str]:
    """Names of the parts of an identity that are not the same."""
    if not isinstance(before, dict):
        return ["version"]
    return [key for key in now if before.get(key) != now[key]]


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size} bytes"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
