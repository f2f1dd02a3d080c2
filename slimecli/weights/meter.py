"""How far moving many bytes has come: a bar for a person, a line now and then for a log; all on stderr."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from slimecli import console

REPORT = 30.0
"""seconds between two lines where no person watches"""


class Meter:
    """Progress by bytes, with speed and the time left; several threads may advance it.

    Args:
        what: is being done, one word.
        total: bytes in the end.
        done: bytes that were there before.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._before = done
        self._lock, self._begin = threading.Lock(), time.monotonic()
        self._told = self._begin
        self._bar: Any = None

    def __enter__(self) -> Self:
        if console.is_interactive():
            from rich import progress

            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
            rates = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
            self._bar = progress.Progress(*columns, *rates, console=console.talk(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """`count` more bytes are there; negative: had to be thrown away."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif now - self._told >= REPORT:
                self._told = now
                console.note(f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB{self._rate(now)}")

    def _rate(self, now: float) -> str:
        """Speed and the time left, once there is something to tell them from."""
        speed = (self._done - self._before) / max(now - self._begin, 1e-9)
        if speed <= 0:
            return ""
        return f", {speed / 1e9:.3f} GB/s, {(self._total - self._done) / speed:.0f} s left"
