"""An event loop on a thread of its own, for answers that are generated while the caller does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Runner(Protocol):
    """What runs coroutines for callers that are none: asyncio.Runner, or LoopThread."""

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run to the end."""

    def close(self) -> None:
        """End what still runs."""


class LoopThread:
    """asyncio.Runner whose tasks go on between two calls. Tasks that are left at the end are cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slime-rollout", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run to the end; Ctrl-C while waiting cancels it."""
        work = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def close(self) -> None:
        """Cancel what is left, then stop. Idempotent."""
        if self._loop.is_closed():
            return
        self.run(cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def cancel_others() -> None:
    """End all other tasks of the loop, and wait until they have."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:  # one that ends may have begun another
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
