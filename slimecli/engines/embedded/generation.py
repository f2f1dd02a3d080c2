"""/generate and what describes the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from aiohttp import web

from slimecli import __version__
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, body, failure, reply
from slimecli.errors import SlimeError


async def send_events(
    request: web.Request, events: AsyncIterator[dict[str, Any]], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Server-sent events, closed by [DONE]. The first is awaited before the status line, so errors keep theirs."""
    iterator = aiter(events)
    first = await anext(iterator, None)
    kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**kind, **(headers or {})})
    await response.prepare(request)
    try:
        if first is not None:
            await response.write(b"data: " + orjson.dumps(first) + b"\n\n")
        async for event in iterator:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    except SlimeError as error:
        await response.write(b"data: " + orjson.dumps({"error": {"message": str(error)}}) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def server_info(engine: EmbeddedEngine) -> dict[str, Any]:
    """SGLang's keys, and the engine's own."""
    info = engine.info()
    return {
        **info,
        "served_model_name": info["model_path"],
        "tokenizer_path": info["model_path"],
        "version": f"slime-{__version__}",
        "max_total_num_tokens": info["slots"] * info["max_context"],
        "max_running_requests": info["slots"],
        "context_length": info["max_context"],
        "tp_size": 1,
        "dp_size": 1,
    }


def routes(engine: EmbeddedEngine, allow_pickle: bool) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""

    async def generate(request: web.Request) -> web.StreamResponse:
        payload = await body(request)
        if payload.get("stream"):
            return await send_events(request, engine.stream(payload))
        return reply(await engine.generate(payload))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def health_generate(request: web.Request) -> web.Response:
        info = engine.info()
        if info["paused"] or info["asleep"] or info["running"] >= info["slots"]:
            return web.Response() if info["weights_ready"] else failure("the engine has no weights", 503)
        params = {"max_new_tokens": 1, "temperature": 0}
        await engine.generate({"input_ids": [0], "sampling_params": params})
        return web.Response()

    return [
        ("POST", "/generate", generate),
        ("PUT", "/generate", generate),
        ("GET", "/health", health),
        ("GET", "/health_generate", health_generate),
        *_info_routes(engine),
    ]


def _info_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    """What describes the engine."""

    async def model_info(request: web.Request) -> web.Response:
        info = server_info(engine)
        names = ("model_path", "tokenizer_path", "weight_version", "model_type", "dtype", "vocab_size")
        return reply({**{n: info[n] for n in names}, "is_generation": True, "preferred_sampling_params": None})

    async def full_info(request: web.Request) -> web.Response:
        return reply(server_info(engine))

    async def models(request: web.Request) -> web.Response:
        info = engine.info()
        card = {
            "id": info["model_path"], "object": "model", "created": 0, "owned_by": "slime", "root": info["model_path"],
            "max_model_len": info["max_context"],
        }  # fmt: skip
        return reply({"object": "list", "data": [card]})

    async def loads(request: web.Request) -> web.Response:
        info = engine.info()
        load = {
            "dp_rank": 0,
            "num_running_reqs": info["running"],
            "num_waiting_reqs": info["waiting"],
            "num_reqs": info["running"] + info["waiting"],
            "num_total_reqs": info["running"] + info["waiting"],
            "max_running_requests": info["slots"],
        }
        return reply({"loads": [load], "dp_rank_count": 1, **load})

    async def tokenize(request: web.Request) -> web.Response:
        payload = await body(request)
        texts = payload.get("prompt", payload.get("text"))
        if not isinstance(texts, str) and not (isinstance(texts, list) and all(isinstance(t, str) for t in texts)):
            raise BadRequest("give prompt: a string or a list of strings")
        many = [engine.codec.encode(t) for t in ([texts] if isinstance(texts, str) else texts)]
        counts = [len(ids) for ids in many]
        single = isinstance(texts, str)
        shape = {"tokens": many[0], "count": counts[0]} if single else {"tokens": many, "count": counts}
        return reply({**shape, "max_model_len": engine.limits.max_context})

    return [
        ("GET", "/get_model_info", model_info),
        ("GET", "/model_info", model_info),
        ("GET", "/get_server_info", full_info),
        ("GET", "/server_info", full_info),
        ("GET", "/v1/models", models),
        ("GET", "/v1/loads", loads),
        ("POST", "/tokenize", tokenize),
        ("POST", "/v1/tokenize", tokenize),
    ]
