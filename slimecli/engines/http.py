"""A RolloutEngine over HTTP: embedded servers and SGLang servers alike."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp
import orjson

from slimecli import console
from slimecli.engines.http_errors import EngineRefusedError, EngineUnreachableError, refusal
from slimecli.engines.http_weights import HttpWeights
from slimecli.engines.streaming import Answers, Tell, events
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.types import WeightReceipt

__all__ = ["EngineRefusedError", "EngineUnreachableError", "HttpEngine", "client_loop"]

SILENCE_S = 30.0
"""an answer that takes longer is followed by a look at the engine's health (seconds)"""
ROUTING_HEADER = "X-SMG-Routing-Key"
PROBE_S = 5.0
"""deadline of that look (seconds)"""


class HttpEngine:
    """One engine at a URL.

    Args:
        url: where it listens.
        timeout_s: deadline of every call (seconds).
        api_key: sent as a bearer token.
        retries: further tries of generate when the connection breaks; an engine's refusal is never retried.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str = "", retries: int = 2) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None
        self._looked = -SILENCE_S
        self.paused = False
        """whether `pause` was called here, and `resume` not yet"""
        self.weights = HttpWeights(self)

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None, doing: str) -> Any:
        """One HTTP call; the decoded JSON (None for an empty body). A `routing_key` becomes the header that all routers
        look for.

        Raises EngineUnreachableError or EngineRefusedError naming the engine and what it was doing.
        """
        data, headers = (None, None) if payload is None else _packed(payload)
        raw, status = await self._sent(self._exchange(method, path, data, self._timeout_s, headers), doing)
        return self._decoded(raw, status, doing)

    async def _sent(self, exchange: Coroutine[Any, Any, tuple[bytes, int]], doing: str) -> tuple[bytes, int]:
        """Await an exchange on the client loop; what goes wrong names the engine and what it was doing."""
        work = asyncio.run_coroutine_threadsafe(exchange, client_loop())
        try:
            return await self._answer(asyncio.wrap_future(work), doing)
        except TimeoutError:
            raise SlimeError(
                f"the engine at {self.url} did not answer within {self._timeout_s:g} s while {doing}",
                "look at its log; raise rollout.request_timeout_s if the work is only slow",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(
                f"no connection to the engine at {self.url} while {doing}: {error or type(error).__name__}",
                "see whether it still runs",
            ) from None

    async def _answer(self, work: asyncio.Future[tuple[bytes, int]], doing: str) -> tuple[bytes, int]:
        """Await an exchange; an engine that has gone silent meanwhile is named to the person watching."""
        begin = time.monotonic()
        try:
            while not (await asyncio.wait([work], timeout=SILENCE_S))[0]:
                await self._look(doing, time.monotonic() - begin)
        finally:
            work.cancel()  # of no effect on one that is done
        return work.result()

    async def _look(self, doing: str, waited_s: float) -> None:
        """Say so if the engine gives no sign of life; slow work alone is no news. Of many requests one asks."""
        now = time.monotonic()
        if now - self._looked < SILENCE_S:
            return
        self._looked = now
        probe = asyncio.run_coroutine_threadsafe(self._exchange("GET", "/health", None, PROBE_S), client_loop())
        try:
            await asyncio.wrap_future(probe)
        except (TimeoutError, aiohttp.ClientError, OSError):
            console.note(
                f"waiting {waited_s:.0f} s for the engine at {self.url} while {doing}: it does not answer its health "
                f"check either; giving up after {self._timeout_s:g} s (rollout.request_timeout_s)"
            )

    async def _exchange(
        self, method: str, path: str, data: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, int]:
        """Send and receive; on the client loop only."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._open().request(method, self.url + path, data=data, timeout=limit, headers=headers) as answer:
            return await answer.read(), answer.status

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # a session and its open connections live and die with one loop, so all of them live on the client loop
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        return self._session

    async def _listen(self, payload: Mapping[str, Any], hear: Callable[[dict[str, Any]], None]) -> tuple[bytes, int]:
        """Hand out the events of `/generate` as they come; on the client loop only. A refusal comes back whole."""
        limit, (data, headers) = aiohttp.ClientTimeout(total=self._timeout_s), _packed({**payload, "stream": True})
        async with self._open().post(self.url + "/generate", data=data, timeout=limit, headers=headers) as answer:
            if answer.status != 200:
                return await answer.read(), answer.status
            async for item in events(answer.content, self.url):
                hear(item)
            return b"", 200

    def _decoded(self, raw: bytes, status: int, doing: str) -> Any:
        try:
            data = orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            data = {"message": raw[:200].decode(errors="replace")}
        refused = isinstance(data, dict) and data.get("success") is False
        if status == 200 and not refused:
            return data
        raise refusal(self.url, doing, reason_of(data, status), status)

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """SGLang /generate. A broken connection is tried again: an answer with a seed comes out the same."""
        return await self._again(lambda: self.call("POST", "/generate", payload, "generating"))

    async def generate_stream(self, payload: Mapping[str, Any], tell: Tell) -> None:
        """The same, told as it comes; after a broken connection each answer goes on where it was."""
        answers = Answers(payload, tell)
        await self._again(lambda: answers.ask(self.stream_once))

    async def stream_once(self, payload: Mapping[str, Any], tell: Tell) -> None:
        """Over one connection; any payload of `/generate`."""
        loop, wrong = asyncio.get_running_loop(), list[SlimeError]()

        def hear(item: dict[str, Any]) -> None:
            try:
                tell(item)
            except SlimeError as error:
                wrong.append(error)

        def hand_over(item: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(hear, item)

        raw, status = await self._sent(self._listen(payload, hand_over), "generating")
        if wrong:
            raise wrong[0]
        if status != 200:
            self._decoded(raw, status, "generating")

    async def _again(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Ask; once more where the connection breaks."""
        tries = 0
        while True:
            try:
                return await ask()
            except EngineUnreachableError:
                tries += 1
                if tries > self._retries:
                    raise
                await asyncio.sleep(0.1 * 2**tries)

    # -- weights (engines.http_weights) ------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, flush, load, verify, continue; returns what the engine now holds."""
        return await self.weights.update(update)

    async def join_group(self, payload: Mapping[str, Any]) -> None:
        """Enter a weight-update process group."""
        await self.weights.join_group(payload)

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        await self.weights.leave_group(name)

    async def fingerprint(self) -> str:
        """Over the engine's live weights; empty from a server that cannot say."""
        return await self.weights.fingerprint()

    async def digests(self) -> dict[str, str]:
        """One digest per live weight, to name the one that differs; empty from a server that cannot say."""
        return await self.weights.digests()

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def info(self) -> dict[str, Any]:
        """/server_info."""
        found: dict[str, Any] = await self.call("GET", "/server_info", None, "describing itself")
        return found

    async def ranks(self) -> int:
        """Processes that the model is spread over; each has a rank of its own in a weight-update process group."""
        return int((await self.info()).get("tp_size", 1))

    async def health(self) -> None:
        """Raises unless the engine answers."""
        await self.call("GET", "/health", None, "answering its health check")

    async def pause(self, mode: str = "abort") -> None:
        """Stop stepping."""
        await self.call("POST", "/pause_generation", {"mode": mode}, "pausing")
        self.paused = True

    async def resume(self) -> None:
        """Go on after pause."""
        await self.call("POST", "/continue_generation", {}, "continuing")
        self.paused = False

    async def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all."""
        payload = {"abort_all": True} if rid is None else {"rid": rid}
        await self.call("POST", "/abort_request", payload, "aborting")

    async def sleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Free device memory by tag."""
        await self.call("POST", "/release_memory_occupation", {"tags": list(tags)}, "going to sleep")

    async def wake(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Take it back."""
        await self.call("POST", "/resume_memory_occupation", {"tags": list(tags)}, "waking up")

    async def close(self) -> None:
        """Close the connections; the server is not ours to stop. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), client_loop()))


@functools.cache
def client_loop() -> asyncio.AbstractEventLoop:
    """The loop, on a thread of its own, that holds every connection: callers come from loops that come and go."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-http-client", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=client_loop.cache_clear)  # threads do not survive a fork: the loop would never turn


def _packed(payload: Mapping[str, Any]) -> tuple[bytes, dict[str, str] | None]:
    """(body, headers) of a request: a routing key is told in the one place where every router looks for it."""
    key = payload.get("routing_key")
    body = {name: value for name, value in payload.items() if name != "routing_key"}
    return orjson.dumps(body), {ROUTING_HEADER: str(key)} if key else None


def reason_of(data: Any, status: int) -> str:
    """Why an engine refused, in its own words.

    Args:
        data: its answer, decoded.
    """
    if isinstance(data, dict):
        error = data.get("error")
        text = error.get("message") if isinstance(error, dict) else error
        text = text or data.get("message") or data.get("detail")
        if text:
            return str(text)
    return f"HTTP {status}"
