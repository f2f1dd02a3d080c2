"""Running scorers beside the event loop: kept daemon threads, and a bound on how many run at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run in a daemon thread: one that hangs past its deadline must not keep the process from ending.

    Threads are kept for the next call, because starting one costs more than most scorers; one that hangs is not.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> Callable[[], None]:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # carried to the waiting coroutine
            failure = error if not isinstance(error, StopIteration) else RuntimeError("StopIteration")
        return lambda: tell(result, failure)

    def tell(result: Any, failure: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    try:
        inbox = idle_threads.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="slime-reward").start()
    inbox.put(work)
    return await future


_Inbox = queue.SimpleQueue[Callable[[], Callable[[], None]]]
idle_threads: list[_Inbox] = []
"""inboxes of the threads that wait for work"""
os.register_at_fork(after_in_child=idle_threads.clear)  # a forked child has the list, not the threads


def _serve(inbox: _Inbox) -> None:
    """Body of a reward thread: it is free again before its caller hears, so that the next call finds it."""
    while True:
        tell = inbox.get()()
        idle_threads.append(inbox)
        tell()


class Gate:
    """A semaphore per event loop, so that one reward function serves several `asyncio.run` calls."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._size))
