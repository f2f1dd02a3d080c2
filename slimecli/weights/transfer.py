"""Files over HTTP that go on where they stopped, and that are what the sender states before they get their name.

huggingface-hub (2.4) starts an interrupted file anew; the hub itself would go on, given a Range header.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slimecli import console, files
from slimecli.errors import DataError, SlimeError
from slimecli.weights.meter import Meter

if TYPE_CHECKING:
    from slimecli.weights.listing import HubFile

WORKERS = 8
"""files at a time"""
TRIES = 5
"""attempts in a row that bring no byte before a file is given up"""
PAUSE = 1.0
"""seconds before the second attempt; doubles with each further one"""
SILENCE = 20.0
"""seconds without a byte after which a connection counts as broken"""
GRACE = 1.0
"""seconds that other files get to stop after one has failed"""


class Stopped(Exception):
    """Another file failed, or the user stopped the download."""


class _Busy(Exception):
    """The server asks to come back later."""

    def __init__(self, status: int, retry_after: str) -> None:
        super().__init__(f"the server is busy (HTTP {status})")
        self.seconds = min(float(retry_after), 300.0) if retry_after.isdigit() else 0.0


@dataclass(frozen=True)
class Job:
    """One file to bring."""

    file: HubFile
    url: str
    target: Path
    partial: Path

    @property
    def arrived(self) -> int:
        """Bytes that an earlier call left behind."""
        return self.partial.stat().st_size if self.partial.is_file() else 0

    @property
    def missing(self) -> int:
        """Bytes still to come; a partial file that is too long is worthless."""
        return self.file.size - (self.arrived if self.arrived <= self.file.size else 0)


class _Arrivals(Meter):
    """Also counts what came over the network."""

    fetched = 0

    def advance(self, count: int, fetched: bool = False) -> None:
        if fetched:
            with self._lock:
                self.fetched += count
        super().advance(count)


def bring(jobs: Sequence[Job], headers: Mapping[str, str]) -> int:
    """Fetch all, several at a time; returns the bytes that came over the network.

    On any failure what has arrived is kept, and the next call goes on from there.
    """
    stop, total = threading.Event(), sum(j.file.size for j in jobs)
    todo = deque(sorted(jobs, key=lambda j: -j.file.size))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work(meter: _Arrivals) -> None:
        while not stop.is_set():
            try:
                _one(todo.popleft(), headers, stop, meter)
                ended.put(None)
            except IndexError:
                return
            except BaseException as error:  # raised again in the caller's thread, which waits for it
                ended.put(error)
                return

    with _Arrivals("download", total, total - sum(j.missing for j in jobs)) as meter:
        # daemons: a thread that waits for a silent server must not hold up the end of the program
        threads = [threading.Thread(target=work, args=(meter,), daemon=True) for _ in jobs[:WORKERS]]
        try:
            for thread in threads:
                thread.start()
            for _ in jobs:
                if (error := ended.get()) is not None:
                    raise error
        finally:
            stop.set()
            deadline = time.monotonic() + GRACE
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
    return meter.fetched


def _one(job: Job, headers: Mapping[str, str], stop: threading.Event, meter: _Arrivals) -> None:
    """Bring one file, whatever it takes; the lock keeps a second process from writing into the same partial file."""
    job.partial.parent.mkdir(parents=True, exist_ok=True)
    job.target.parent.mkdir(parents=True, exist_ok=True)
    with files.explain_disk_errors(job.target), job.partial.open("ab") as handle:
        _lock(handle, job, stop)
        if job.target.is_file() and not job.file.damage(job.target):
            meter.advance(job.missing)
            return
        for second in (False, True):
            _fill(job, handle, headers, stop, meter)
            wrong = job.file.damage(job.partial)
            if not wrong:
                os.fsync(handle.fileno())
                job.partial.replace(job.target)
                return
            handle.truncate(0)
            meter.advance(-job.file.size)
            if not second:
                console.warn(f"{job.file.path} arrived damaged ({wrong}): fetched once more")
        raise DataError(
            f"{job.file.path} arrived damaged twice: {wrong}",
            "a proxy or mirror alters it, or the network is bad: try another HF_ENDPOINT",
        )


def _lock(handle: BinaryIO, job: Job, stop: threading.Event) -> None:
    told = False
    while True:
        if stop.is_set():
            raise Stopped
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                console.note(f"{job.file.path}: waiting, another process downloads it")
                told = True
            stop.wait(0.2)


def _fill(job: Job, handle: BinaryIO, headers: Mapping[str, str], stop: threading.Event, meter: _Arrivals) -> None:
    """Append until the file has the size stated; connections that break are made anew."""
    failures = 0
    while (have := handle.seek(0, os.SEEK_END)) < job.file.size:
        wait, problem = 0.0, "the connection was closed too early"
        try:
            _stream(job, handle, headers, stop, meter)
        except _Busy as busy:
            wait, problem = busy.seconds, str(busy)
        except transport_error() as error:
            if getattr(error, "response", None) is not None and error.response.status_code < 500:  # type: ignore[attr-defined]
                raise
            problem = str(error) or type(error).__name__
        handle.flush()
        now = handle.seek(0, os.SEEK_END)
        if now >= job.file.size:
            return
        failures = 1 if now > have else failures + 1
        if failures >= TRIES:
            raise SlimeError(
                f"{job.file.path}: {problem}; {now} of {job.file.size} bytes have arrived",
                "call the same again: it goes on from there; HF_ENDPOINT=URL uses a mirror",
            )
        stop.wait(max(wait, PAUSE * 2 ** (failures - 1)))


def _stream(job: Job, handle: BinaryIO, headers: Mapping[str, str], stop: threading.Event, meter: _Arrivals) -> None:
    """One request, from where the file ends."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    if stop.is_set():
        raise Stopped
    have = handle.seek(0, os.SEEK_END)
    asked = {**headers, "Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with get_session().stream("GET", job.url, headers=asked, timeout=SILENCE) as response:
        if response.status_code in (408, 429, 503):
            raise _Busy(response.status_code, response.headers.get("Retry-After", ""))
        hf_raise_for_status(response)
        if have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            handle.truncate(0)  # the server sends the whole file, whatever was asked
            meter.advance(-have)
        for chunk in response.iter_bytes():
            if stop.is_set():
                raise Stopped
            handle.write(chunk)
            meter.advance(len(chunk), fetched=True)
            if handle.tell() > job.file.size:
                break


def transport_error() -> type[Exception]:
    """What the hub library's HTTP client raises; which client that is depends on its release."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__mro__[1]
    return base
