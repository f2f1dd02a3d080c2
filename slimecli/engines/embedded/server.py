"""SGLang's HTTP API in front of an EmbeddedEngine. Errors are JSON with a reason; a traceback goes to the log only."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.errors import SlimeError
from slimecli.ports import cannot_listen, url_at

log = logging.getLogger("slimecli.engine")
MAX_BODY = 1 << 31
"""largest request: weights may come in one (bytes)"""
IN_FLIGHT: web.AppKey[Counter[str]] = web.AppKey("in_flight", Counter)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/health", "/health_generate")
"""answered without an API key, as load balancers expect"""


def reply(data: Any, status: int = 200) -> web.Response:
    """JSON by orjson."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def failure(message: str, status: int) -> web.Response:
    """An error as SGLang shapes it. `success` and `message` are there for clients of the control calls."""
    return reply({"error": {"message": message}, "success": False, "message": message}, status)


async def body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; empty when there is none."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from None
    if not raw:
        return {}
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    return data


def web_app(routes: list[tuple[str, str, Handler]], *, api_key: str = "", max_body: int = MAX_BODY) -> web.Application:
    """An application of (method, path, handler), with a key (empty: none) and errors told as JSON.

    `app[IN_FLIGHT]` counts the requests that are being answered.

    Args:
        max_body: larger requests are refused (bytes).
    """
    from slimecli.engines.embedded import control

    @web.middleware
    async def explain(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.path not in OPEN_PATHS and not _has_key(request, api_key):
            return failure("wrong or missing API key", 401)
        app[IN_FLIGHT]["requests"] += 1
        try:
            return await handler(request)
        except web.HTTPException as error:
            return failure(f"{request.method} {request.path}: {error.reason}", error.status)
        except SlimeError as error:
            usual = 400 if isinstance(error, BadRequest) else control.status_of(error)
            return failure(str(error), getattr(error, "http_status", usual))
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception as error:  # the boundary of the server: the log has the traceback, the caller the reason
            log.exception("%s %s failed", request.method, request.path)
            return failure(f"the engine failed: {type(error).__name__}: {error}", 500)
        finally:
            app[IN_FLIGHT]["requests"] -= 1

    app = web.Application(client_max_size=max_body, middlewares=[explain])
    app[IN_FLIGHT] = Counter()
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    return app


def _has_key(request: web.Request, api_key: str) -> bool:
    """Whether a request shows the key, as a bearer token or, as Anthropic's clients do, in x-api-key."""
    given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    # a header may hold any bytes: aiohttp hands on those that are no text as surrogates
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), api_key.encode())


def build_app(engine: EmbeddedEngine, *, api_key: str = "", allow_pickle: bool = False) -> web.Application:
    """All routes of an engine by itself."""
    from slimecli.agents.routes import chat_routes
    from slimecli.agents.text_engine import embedded

    return web_app([*engine_routes(engine, allow_pickle=allow_pickle), *chat_routes(embedded(engine))], api_key=api_key)


def engine_routes(engine: EmbeddedEngine, *, allow_pickle: bool = False) -> list[tuple[str, str, Handler]]:
    """SGLang's native routes."""
    from slimecli.engines.embedded import control, generation

    return [*generation.routes(engine, allow_pickle), *control.routes(engine, allow_pickle)]


class Listener:
    """An application on an address, from within an event loop.

    Args:
        drain_s: how long `stop` waits for requests in flight (seconds).
    """

    def __init__(self, app: web.Application, *, drain_s: float = 1.0) -> None:
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=drain_s)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the URL. Port 0 takes a free one."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(host, port, error) from None
        found = self._runner.addresses[0][1]
        return url_at(host, found)

    async def stop(self) -> None:
        """Stop listening; what is behind the application stays."""
        await self._runner.cleanup()


class Server(Listener):
    """An engine on an address."""

    def __init__(
        self, engine: EmbeddedEngine, *, api_key: str = "", allow_pickle: bool = False, drain_s: float = 1.0
    ) -> None:
        super().__init__(build_app(engine, api_key=api_key, allow_pickle=allow_pickle), drain_s=drain_s)


def start_server_thread(
    engine: EmbeddedEngine, host: str = "127.0.0.1", port: int = 0, *, api_key: str = "", allow_pickle: bool = False
) -> tuple[str, Callable[[], None]]:
    """Serve from a thread of its own; returns (url, stop). `stop` also closes the engine and is idempotent."""
    loop = asyncio.new_event_loop()
    server = Server(engine, api_key=api_key, allow_pickle=allow_pickle)
    thread = threading.Thread(target=loop.run_forever, name="slime-http", daemon=True)
    thread.start()
    once = threading.Lock()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def stop() -> None:
        if not once.acquire(blocking=False):
            return
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        end()

    try:
        url = asyncio.run_coroutine_threadsafe(server.start(host, port), loop).result()
    except SlimeError:
        end()
        raise
    return url, stop
