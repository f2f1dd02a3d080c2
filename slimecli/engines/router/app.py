"""The built-in router: HTTP in, HTTP out to one of several engines, again to another one if that engine is lost."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from slimecli.engines.router.policies import Ask, Policy
from slimecli.engines.router.workers import Worker, WorkerLost, Workers, log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/health", "/health_generate", "/liveness", "/readiness")
"""answered by the router itself, without an API key"""
EVERYWHERE = ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation")
"""go to every engine"""
NOWHERE = (
    "/update_weights", "/init_weights", "/destroy_weights", "/begin_weight", "/end_weight", "/release_memory",
    "/resume_memory", "/weights_",
)  # fmt: skip
"""beginnings of control calls that must reach each engine by itself"""
_HOP_HEADERS = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
    "upgrade", "host", "content-length", "accept-encoding", "date", "server",
}  # fmt: skip
KEY_HEADERS = ("X-SMG-Routing-Key", "X-Session-Id")
KEY_FIELDS = ("routing_key", "session_id")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a router behaves."""

    policy: Policy
    retries: int = 3
    """further engines that a request is given to when its engine is lost"""
    wait_s: float = 60.0
    """how long a request waits for an engine when none lives (seconds)"""
    max_in_flight: int = 8192
    """requests beyond this are turned away with 429"""
    max_body: int = 256 << 20
    """largest request (bytes)"""
    max_buffered: int = 1 << 30
    """requests in flight are held in memory, to be sent again; beyond this sum they are turned away with 429 (bytes)"""
    timeout_s: float = 1800.0
    """deadline of one request (seconds)"""
    api_key: str = field(default="", repr=False)
    """clients must send it as a bearer token; it is passed on to the engines"""


class Refused(Exception):
    """An engine said that it cannot serve now."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


def failure(message: str, status: int) -> web.Response:
    """An error as SGLang and OpenAI shape it."""
    return reply({"error": {"message": message, "type": "router_error", "code": status}}, status)


def reply(data: Any, status: int = 200) -> web.Response:
    """JSON."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


class Gateway:
    """The data path."""

    def __init__(self, settings: Settings, workers: Workers) -> None:
        self.settings = settings
        self.workers = workers
        self._in_flight = 0
        self._buffered = 0
        self._session: aiohttp.ClientSession | None = None

    async def open(self, urls: list[str]) -> None:
        """Start; the engines are looked at once before this returns."""
        limit = aiohttp.ClientTimeout(total=self.settings.timeout_s, sock_connect=10)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=limit, auto_decompress=False
        )
        await self.workers.open(self._session, urls)

    async def close(self) -> None:
        """End."""
        await self.workers.close()
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """To one engine; to another one, as long as nothing of an answer has gone out, when that one is lost."""
        if request.path.startswith(NOWHERE):
            return failure(f"{request.path} goes to each engine by itself: GET /workers lists them", 404)
        if self._in_flight >= self.settings.max_in_flight:
            return failure(f"{self._in_flight} requests are in flight already", 429)
        body = await request.read()
        if self._buffered + len(body) > self.settings.max_buffered:
            return failure(f"requests of {self._buffered} bytes are in flight already", 429)
        self._in_flight += 1
        self._buffered += len(body)
        try:
            return await self._try_engines(request, body)
        finally:
            self._in_flight -= 1
            self._buffered -= len(body)

    async def _try_engines(self, request: web.Request, body: bytes) -> web.StreamResponse:
        ask = ask_of(request, body)
        tried: set[str] = set()
        told: list[str] = []
        refused: web.Response | None = None
        for _ in range(self.settings.retries + 1):
            worker = await self._choose(ask, tried)
            if worker is None:
                break
            try:
                return await self._relay(request, body, worker)
            except WorkerLost as lost:
                log.warning("%s %s: %s; another engine is asked", request.method, request.path, lost)
                told.append(str(lost))
            except Refused as error:
                refused = error.answer
            tried.add(worker.id)
        if refused is not None:
            return refused
        known = ", ".join(w.url for w in self.workers.all()) or "none"
        return failure(f"no engine answered ({'; '.join(told) or 'none lives'}; known engines: {known})", 503)

    async def _choose(self, ask: Ask, tried: set[str]) -> Worker | None:
        """A living engine, one not tried yet if there is such; waits for one if none lives."""
        end = asyncio.get_running_loop().time() + self.settings.wait_s
        while not (living := self.workers.living()):
            left = end - asyncio.get_running_loop().time()
            if left <= 0 or not self.workers.all():
                return None
            try:
                await asyncio.wait_for(self.workers.changed.wait(), left)
            except TimeoutError:
                return None
        fresh = [w for w in living if w.id not in tried] or living
        chosen = self.settings.policy.pick(ask, fresh)
        assert isinstance(chosen, Worker)
        return chosen

    async def _relay(self, request: web.Request, body: bytes, worker: Worker) -> web.StreamResponse:
        worker.load += 1
        answer: aiohttp.ClientResponse | None = None
        try:
            answer, raw = await worker.unless_lost(self._fetch(request, body, worker.url))
            if raw is None:
                return await self._stream(request, worker, answer)
            found = web.Response(body=raw, status=answer.status, headers=_passed_on(answer.headers))
            if answer.status in (502, 503):
                raise Refused(found)
            worker.served += 1
            return found
        except TimeoutError:
            return failure(f"{worker.url} did not answer within {self.settings.timeout_s:g} s", 504)
        finally:
            worker.load -= 1
            if answer is not None:
                answer.release()

    async def _fetch(self, request: web.Request, body: bytes, url: str) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """An engine's answer and its body; None instead of a stream of events, which is read as it comes."""
        assert self._session is not None, "open() comes first"
        headers = [*_passed_on(request.headers), ("Accept-Encoding", "identity")]
        answer = await self._session.request(request.method, url + request.path_qs, data=body, headers=headers)
        if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            return answer, None
        return answer, await answer.read()

    async def _stream(self, request: web.Request, worker: Worker, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass events on as they come; the first is awaited before the status line, so that it can be retried."""
        first = await worker.unless_lost(answer.content.readany())
        response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
        await response.prepare(request)
        chunk = first
        try:
            while chunk:
                await response.write(chunk)
                chunk = await worker.unless_lost(answer.content.readany())
            worker.served += 1
        except (WorkerLost, TimeoutError) as error:
            # the client has a part already: what is missing must not look like the end
            told = str(error) or f"{worker.url} did not end its answer within {self.settings.timeout_s:g} s"
            await response.write(b"data: " + orjson.dumps({"error": {"message": told}}) + b"\n\n")
        await response.write_eof()
        return response

    async def everywhere(self, request: web.Request) -> web.Response:
        """To every living engine; the answers by address."""
        session = self._session
        assert session is not None, "open() comes first"
        body, headers = await request.read(), _passed_on(request.headers)

        async def ask(worker: Worker) -> tuple[str, Any]:
            call = session.request(request.method, worker.url + request.path_qs, data=body, headers=headers)
            try:
                async with await worker.unless_lost(call) as answer:
                    return worker.url, {"status": answer.status}
            except (WorkerLost, TimeoutError) as error:
                return worker.url, {"status": 503, "message": str(error)}

        found = dict(await asyncio.gather(*(ask(w) for w in self.workers.living())))
        if not found:
            return failure(f"no engine lives: {request.path} reached nobody", 503)
        good = all(a["status"] == 200 for a in found.values())
        return reply({"success": good, "workers": found}, 200 if good else 502)


def ask_of(request: web.Request, body: bytes) -> Ask:
    """Key and prompt of a request; a body that is no JSON object has neither."""
    key = next((request.headers[name] for name in KEY_HEADERS if request.headers.get(name)), "")
    if key or not body:
        return Ask(key)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Ask()
    if not isinstance(data, dict):
        return Ask()
    key = next((str(data[name]) for name in KEY_FIELDS if data.get(name)), "")
    if "messages" in data:
        return Ask(key, orjson.dumps(data["messages"]).decode())
    prompt = data.get("input_ids") or data.get("text") or data.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts, which stay together
    return Ask(key, prompt)


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_HEADERS]


def build_app(gateway: Gateway) -> web.Application:
    """All routes: the router's own, and everything else to an engine."""
    from slimecli.engines.router.control import routes

    key = gateway.settings.api_key

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        shown = given.encode("utf-8", "surrogateescape")  # a header may hold any bytes
        if key and request.path not in OPEN_PATHS and not hmac.compare_digest(shown, key.encode()):
            return failure("wrong or missing API key", 401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return failure(f"{request.method} {request.path}: {error.reason}", error.status)

    app = web.Application(client_max_size=gateway.settings.max_body, middlewares=[guard])
    for method, path, handler in routes(gateway):
        app.router.add_route(method, path, handler)
    for path in EVERYWHERE:
        app.router.add_route("*", path, gateway.everywhere)
    app.router.add_route("*", "/{path:.*}", gateway.forward)
    return app
