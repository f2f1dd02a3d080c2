"""The head of a Ray cluster, watched: a minute after it is gone Ray ends this process, in words of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from slimecli.errors import SlimeError

LOOK_S = 2.0
"""between two looks, and deadline of each (seconds)"""
LOST_S = 20.0
"""a head that takes no connection for so long is gone (seconds); Ray itself would wait 60"""


class HeadWatch:
    """Looks whether the head takes connections, on a thread of its own.

    Args:
        address: HOST:PORT of the head.

    Attributes:
        error: what happened; None while the head is there.
    """

    def __init__(self, address: str) -> None:
        self.error: SlimeError | None = None
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._told: list[Callable[[SlimeError], None]] = []
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="slime-ray-head", daemon=True).start()

    def tell(self, act: Callable[[SlimeError], None]) -> None:
        """Call this, from the watching thread, when the head is lost; now, if it is."""
        self._told.append(act)
        if self.error is not None:
            act(self.error)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._end.set()

    def _watch(self) -> None:
        since, trouble = time.monotonic(), ""
        while not self._end.wait(LOOK_S):
            try:
                socket.create_connection(self._address, timeout=LOOK_S).close()
                since = time.monotonic()
            except OSError as error:
                trouble = str(error)
            if time.monotonic() - since >= LOST_S and trouble:
                self._lose(trouble)
                return

    def _lose(self, trouble: str) -> None:
        host, port = self._address
        self.error = SlimeError(
            f"the head of the Ray cluster at {host}:{port} is gone ({trouble}): no process of the run can be reached "
            "without it",
            "start Ray again; `slime run --resume` goes on from the last checkpoint",
        )
        for act in self._told:
            act(self.error)


_watch: HeadWatch | None = None
"""of the cluster that this process belongs to: Ray allows one at a time"""


def watch_head() -> HeadWatch:
    """Begin to watch the head of the cluster that this process has joined or started."""
    global _watch
    import ray

    if _watch is not None:
        _watch.close()
    _watch = HeadWatch(ray.get_runtime_context().gcs_address)
    return _watch


def head_error() -> SlimeError | None:
    """What happened to the head; None: nothing is known."""
    return _watch.error if _watch is not None else None
