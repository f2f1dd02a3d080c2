"""The one address of `slime serve`: adapters, native endpoints, sessions; and what goes on beside answering."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from slimecli import console
from slimecli.agents.conversation import Sessions
from slimecli.agents.routes import Route, about_routes, chat_routes
from slimecli.agents.text_engine import callers_fault
from slimecli.agents.wire import session_name
from slimecli.engines.embedded.server import IN_FLIGHT, Listener, body, engine_routes, failure, reply, web_app
from slimecli.errors import SlimeError
from slimecli.ports import check_free
from slimecli.protocols import WeightUpdate
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.serving.fleet import Fleet, LocalFleet, open_fleet
from slimecli.serving.follow import Follower
from slimecli.serving.store import LiveStore, recording

MAX_BODY = 256 << 20
"""largest request, as the router has it (bytes)"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
REAP_S = 0.5
"""time between two looks for idle sessions, at most (seconds)"""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What `slime serve` was asked for."""

    recipe: Recipe
    learner: Recipe
    """recipe of the run that is recorded for: recorded answers are sampled, and sessions end, as it says"""
    weights: Path
    """HF folder"""
    version: int
    """step of the run that the weights are of; 0 for a model"""
    logs: Path
    """folder for what engines and router say"""
    port: int
    api_key: str = ""
    follow: RunDir | None = None
    record: RunDir | None = None

    @property
    def follow_from(self) -> int:
        """Step of the followed run that the weights are of; -1: they are no run's, or another's."""
        own = self.follow and any(place.samefile(self.follow.root) for place in self.weights.absolute().parents)
        return self.version if own else -1


async def serve_all(asked: Serving) -> None:
    """Serve until Ctrl-C or SIGTERM, then stop listening and let requests in flight end; a second one cuts them short.

    {"url": ...} is printed on stdout when requests can come.
    """
    recipe = asked.recipe
    warn_if_open(recipe.engine.host, asked.api_key)
    check_free(recipe.engine.host, asked.port)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(recording(asked.record.live_dir)) if asked.record else None
        fleet = await asyncio.to_thread(open_fleet, recipe, asked.weights, asked.logs, asked.api_key)
        stack.push_async_callback(fleet.close)
        on_signals(stop.set)
        await _mark(fleet, asked)
        sessions = _sessions(fleet, store) if store else None
        app = web_app(_routes(fleet, sessions, asked.learner), api_key=asked.api_key, max_body=MAX_BODY)
        listener = Listener(app, drain_s=recipe.rollout.request_timeout_s)
        stack.push_async_callback(listener.stop)
        url = await listener.start(recipe.engine.host, asked.port)
        console.emit({"url": url})
        console.say(f"serving {asked.weights} at {url} (Ctrl-C stops)")
        tasks = [fleet.watch()]
        if asked.follow is not None:
            follower = Follower(asked.follow, fleet, version=asked.follow_from, timeout_s=recipe.sync.timeout_s)
            tasks.append(follower.watch())
        if sessions is not None:
            tasks.append(reap(sessions, asked.learner.live.idle_s))
        await _until(stop, tasks)
        on_signals(lambda: asyncio.ensure_future(fleet.abort()))
        if open_requests := app[IN_FLIGHT]["requests"]:
            console.say(f"finishing {open_requests} request(s); Ctrl-C again cuts them short")


def warn_if_open(host: str, api_key: str) -> None:
    """Beyond this machine the model answers whoever asks, unless a key is demanded."""
    if host not in LOOPBACK and not api_key:
        console.warn(
            f"{host} can be reached from other machines, and no key is demanded: whoever reaches it can use the model "
            "and its control endpoints (--api-key-env NAME)"
        )


def on_signals(act: Callable[[], Any]) -> None:
    """What Ctrl-C and SIGTERM do from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, act)


async def _until(stop: asyncio.Event, works: list[Coroutine[Any, Any, None]]) -> None:
    """Run the works until stopped; the failure of one is raised."""
    tasks = [asyncio.ensure_future(w) for w in [stop.wait(), *works]]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


async def _mark(fleet: Fleet, asked: Serving) -> None:
    """Tell the engines which version they hold, where answers are to say so."""
    if asked.version and (asked.follow or asked.record):
        await fleet.update(WeightUpdate(kind="disk", version=asked.version, folder=asked.weights))


def _sessions(fleet: Fleet, store: LiveStore) -> Sessions:
    """Sessions that are written down, those of the server before us included."""
    sessions = Sessions(
        fleet.text, max_tokens=fleet.text.max_context, on_open=store.opened, on_turn=store.turn, on_end=store.end
    )
    recovered = store.recover()
    for conversation in recovered:
        sessions.adopt(conversation)
    if recovered:
        console.note(f"{len(recovered)} conversation(s) of the server before go on")
    return sessions


async def reap(sessions: Sessions, idle_s: float) -> None:
    """End what nobody goes on with."""
    told: set[str] = set()
    while True:
        trouble: set[str] = set()
        for id_ in sessions.idle(idle_s):
            try:
                sessions.end(id_, why="idle")
            except SlimeError as error:  # a full disk: they stay open until they can be written
                trouble.add(error.what)
        for what in sorted(trouble - told):
            console.warn(f"idle sessions cannot be written: {what}")
        told = trouble
        await asyncio.sleep(min(REAP_S, idle_s))


def recorded_sampling(recipe: Recipe) -> dict[str, Any]:
    """Sampling of recorded answers: the recipe's, which the trainer computes log-probs for, whatever clients ask."""
    section = recipe.rollout
    return {name: getattr(section, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def _routes(fleet: Fleet, sessions: Sessions | None, learner: Recipe) -> list[Route]:
    sampling = recorded_sampling(learner) if sessions is not None else None
    own = chat_routes(fleet.text, sessions, sampling=sampling)
    native = engine_routes(fleet.engine) if isinstance(fleet, LocalFleet) else proxied(fleet)
    return [*native, *own]


def proxied(fleet: Fleet) -> list[Route]:
    """Native endpoints in front of servers of their own. Weights and memory are the fleet's business alone."""
    text = fleet.text

    async def generate(request: web.Request) -> web.StreamResponse:
        from slimecli.engines.embedded.generation import send_events

        payload = await body(request)
        session_name(payload.get("routing_key"))
        if payload.get("stream"):
            return await send_events(request, text.stream(payload))
        with callers_fault():
            return reply(await text.engine.generate(payload))

    async def ask(request: web.Request) -> web.Response:
        """The first server's answer to a question about the model."""
        if not fleet.urls:
            return failure("no engine is there at the moment", 503)
        return await _pass_on(fleet.urls[0] + request.path, request, fleet.key)

    async def health(request: web.Request) -> web.Response:
        return web.Response() if fleet.urls else failure("no engine is left", 503)

    async def loads(request: web.Request) -> web.Response:
        running = request.app[IN_FLIGHT]["requests"] - 1
        return reply({"num_running_reqs": running, "num_reqs": running, "engines": fleet.urls})

    questions = ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/get_weight_version")
    return [
        ("POST", "/generate", generate),
        *(route for route in about_routes(text) if route[1] != "/health"),
        ("GET", "/health", health),
        ("GET", "/health_generate", health),
        ("GET", "/v1/loads", loads),
        ("POST", "/tokenize", ask),
        *(("GET", path, ask) for path in (*questions, "/weight_version", "/weights_fingerprint")),
    ]


async def _pass_on(url: str, request: web.Request, key: str) -> web.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with _client() as client:
        try:
            data = await request.read() or None
            async with client.request(request.method, url, data=data, headers=headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise SlimeError(f"the engine at {url} does not answer: {error!r}", "see its log") from None


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[aiohttp.ClientSession]:
    limit = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=limit, json_serialize=lambda x: orjson.dumps(x).decode()) as client:
        yield client
