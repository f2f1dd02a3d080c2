"""The engines behind the built-in router: who is there, who lives, who is lost while somebody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

log = logging.getLogger("slimecli.router")
T = TypeVar("T")


class WorkerLost(Exception):
    """The engine that was asked is gone; somebody else can be asked."""


@dataclass(eq=False)
class Worker:
    """One engine."""

    url: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    load: int = 0
    """requests in flight"""
    served: int = 0
    """requests answered"""
    healthy: bool = True
    misses: int = 0
    """health checks in a row without an answer"""
    lost: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """done when the engine is given up"""

    def describe(self) -> dict[str, Any]:
        """As smg's GET /workers does."""
        status = "ready" if self.healthy else "not_ready"
        facts = {"id": self.id, "url": self.url, "is_healthy": self.healthy, "status": status, "load": self.load}
        return {**facts, "worker_type": "regular", "connection_mode": "http", "served": self.served}

    async def unless_lost(self, work: Any) -> Any:
        """The result of an awaitable; WorkerLost if the engine is given up first, or the connection breaks."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WorkerLost(f"{self.url} does not answer its health checks")
            return task.result()
        except aiohttp.ClientConnectorError as error:
            self.give_up(f"refuses connections: {error.strerror or error}")
            raise WorkerLost(f"{self.url} refuses connections") from None
        except aiohttp.ConnectionTimeoutError:
            raise WorkerLost(f"{self.url} accepts no connection") from None
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerLost(f"the connection to {self.url} broke: {error or type(error).__name__}") from None
        finally:
            task.cancel()

    def give_up(self, why: str) -> None:
        """Choose it no more, and wake those who wait for it."""
        if self.healthy:
            log.warning("%s %s: given up until it answers again", self.url, why)
        self.healthy = False
        if not self.lost.done():
            self.lost.set_result(None)

    def take_back(self) -> None:
        """It answers (again)."""
        self.misses = 0
        if not self.healthy:
            log.info("%s answers again", self.url)
            self.healthy, self.lost = True, asyncio.get_running_loop().create_future()


class Workers:
    """All engines, looked at every `interval_s`.

    Args:
        timeout_s: deadline of one look (seconds).
        threshold: looks in vain after which an engine is given up.
    """

    def __init__(self, *, interval_s: float, timeout_s: float, threshold: int) -> None:
        self._interval_s, self._timeout_s, self._threshold = interval_s, timeout_s, threshold
        self._all: dict[str, Worker] = {}
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        """set for a moment when an engine comes or comes back"""

    async def open(self, session: aiohttp.ClientSession, urls: list[str]) -> None:
        """Take them up and start looking."""
        self._session = session
        for url in urls:
            self.add(url)
        await self.look()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def all(self) -> list[Worker]:
        """Every one, in the order of their coming."""
        return list(self._all.values())

    def living(self) -> list[Worker]:
        """Those that can be asked."""
        return [w for w in self._all.values() if w.healthy]

    def find(self, id_: str) -> Worker | None:
        """By id."""
        return self._all.get(id_)

    def by_url(self, url: str) -> Worker | None:
        """By address."""
        return next((w for w in self._all.values() if w.url == url.rstrip("/")), None)

    def add(self, url: str) -> Worker:
        """A new one; it counts as living until a look tells otherwise."""
        worker = Worker(url.rstrip("/"))
        self._all[worker.id] = worker
        log.info("%s added", worker.url)
        self._announce()
        return worker

    def remove(self, worker: Worker) -> None:
        """Choose it no more; what is in flight there ends by itself."""
        self._all.pop(worker.id, None)
        log.info("%s removed, %d requests still in flight there", worker.url, worker.load)

    async def look(self) -> None:
        """At all of them, at the same time."""
        await asyncio.gather(*(self._look_at(w) for w in self.all()))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def _look_at(self, worker: Worker) -> None:
        assert self._session is not None, "open() comes first"
        try:
            limit = aiohttp.ClientTimeout(total=self._timeout_s)
            async with self._session.get(f"{worker.url}/health", timeout=limit) as answer:
                good = answer.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            good = False
        if good:
            was_healthy = worker.healthy
            worker.take_back()
            if not was_healthy:
                self._announce()
            return
        worker.misses += 1
        if worker.misses >= self._threshold:
            worker.give_up(f"did not answer {worker.misses} health checks")

    def _announce(self) -> None:
        self.changed.set()
        self.changed.clear()
