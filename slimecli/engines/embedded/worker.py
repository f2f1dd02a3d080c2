"""The engine's thread: requests and commands in, futures out. Everything that touches the model happens here."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from slimecli.engines.embedded.scheduler import Scheduler
from slimecli.errors import SlimeError

T = TypeVar("T")
log = logging.getLogger("slimecli.engine")


class Worker:
    """Steps the scheduler while there is work; commands run between steps, so nothing needs a lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.hold: set[str] = set()
        """reasons not to step: `pause`, `update`, `sleep`; changed on this thread only"""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="slime-engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run a command between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(run)
        return future

    def _put(self, item: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise SlimeError("the engine is closed", "open a new one")
            self._inbox.put(item)

    def close(self) -> None:
        """End the thread; what waits is answered with an error. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                if self.hold:
                    continue
                try:
                    self.scheduler.step()
                except Exception as error:  # whatever it is, those who wait must hear of it
                    self._fail(error)
        self.scheduler.fail_all(SlimeError("the engine was closed while it generated", "open a new one"))

    def _take(self) -> bool:
        """Run what is in the inbox; wait for more when there is nothing to step. False: close."""
        idle = bool(self.hold) or not self.scheduler.can_step
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            item()
            idle = False

    def _fail(self, error: Exception) -> None:
        log.exception("the engine's step failed")
        told = SlimeError(
            f"the engine's step failed: {type(error).__name__}: {error}",
            "see the engine's log; with an out-of-memory error lower engine.slots or engine.max_context",
        )
        self.scheduler.fail_all(told)


class Gather:
    """Replies of several requests -> one future, in their order; the first failure fails all."""

    def __init__(self, count: int) -> None:
        self.future: Future[list[dict[str, Any]]] = Future()
        self._replies: list[dict[str, Any] | None] = [None] * count
        self._open = count

    def finisher(self, index: int) -> Callable[[dict[str, Any]], None]:
        """What request `index` calls with its reply."""

        def finish(reply: dict[str, Any]) -> None:
            self._replies[index] = reply
            self._open -= 1
            if self._open == 0 and not self.future.done():
                self.future.set_result([r for r in self._replies if r is not None])

        return finish

    def fail(self, error: Exception) -> None:
        """What a request calls when the engine fails."""
        self._open -= 1
        if not self.future.done():
            self.future.set_exception(error)


def numbered(tell: Callable[[dict[str, Any]], None], index: int) -> Callable[[dict[str, Any]], None]:
    """Tell replies with the number of their answer."""
    return lambda reply: tell({**reply, "index": index})


def both(
    first: Callable[[dict[str, Any]], None], second: Callable[[dict[str, Any]], None]
) -> Callable[[dict[str, Any]], None]:
    """One after the other."""

    def call(reply: dict[str, Any]) -> None:
        first(reply)
        second(reply)

    return call
