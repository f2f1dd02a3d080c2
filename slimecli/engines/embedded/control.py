"""Abort, pause, weights and memory: SGLang's control calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from slimecli.engines.embedded import weights
from slimecli.engines.embedded.engine import TAGS, EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, body, failure, reply
from slimecli.errors import SlimeError
from slimecli.protocols import Running
from slimecli.types import WeightReceipt


def status_of(error: SlimeError) -> int:
    """400 for what the caller can mend, 503 for an engine that cannot serve now."""
    return 400 if isinstance(error, weights.WeightsRefused) else 503


def routes(engine: EmbeddedEngine, allow_pickle: bool) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""
    return [
        *_flow_routes(engine),
        *_weight_routes(engine),
        *_part_routes(engine, allow_pickle),
        *_memory_routes(engine),
    ]


def _flow_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    async def abort(request: web.Request) -> web.Response:
        payload = await body(request)
        everything, rid = bool(payload.get("abort_all")), payload.get("rid")
        if not everything and not rid:
            raise BadRequest("give rid, or abort_all: true")
        await engine.abort(None if everything else str(rid))
        return reply({"success": True})

    async def pause(request: web.Request) -> web.Response:
        mode = (await body(request)).get("mode", "abort")
        try:
            await engine.pause(str(mode))
        except SlimeError as error:
            raise BadRequest(error.what, error.fix) from None
        return reply({"status": "ok", "success": True, "message": f"paused ({mode})"})

    async def resume(request: web.Request) -> web.Response:
        await engine.resume()
        return reply({"status": "ok", "success": True, "message": "continued"})

    async def flush(request: web.Request) -> web.Response:
        if await engine.flush():
            return reply({"success": True, "message": "Cache flushed."})
        return failure("requests are running; the cache was not flushed", 400)

    return [
        ("POST", "/abort_request", abort),
        ("POST", "/pause_generation", pause),
        ("POST", "/continue_generation", resume),
        ("GET", "/flush_cache", flush),
        ("POST", "/flush_cache", flush),
    ]


def _receipt(receipt: WeightReceipt) -> web.Response:
    return reply(
        {
            "success": True,
            "message": "weights updated",
            "version": receipt.version,
            "fingerprint": receipt.fingerprint,
            "seconds": receipt.seconds,
            "bytes": receipt.bytes_,
            "pause_seconds": receipt.pause_seconds,
            "how": receipt.how,
        }
    )


def _asked(payload: dict[str, Any]) -> tuple[str | None, Running]:
    """(version it names, what becomes of running requests). Prompt caches are dropped by every update."""
    version = payload.get("weight_version")
    running: Any = payload.get("running") or ("abort" if payload.get("abort_all_requests") else "finish")
    if running not in get_args(Running):
        raise BadRequest(f"unknown running {running!r}", f"use {', '.join(get_args(Running))}")
    return None if version is None else str(version), running


def _folder(payload: dict[str, Any], key: str) -> Path:
    folder = Path(str(payload.get(key) or ""))
    if not payload.get(key) or not folder.is_dir():
        raise BadRequest(f"{key} {payload.get(key)!r} is not a folder on this machine")
    return folder


def _weight_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    """Whole updates, and what is held."""

    async def from_disk(request: web.Request) -> web.Response:
        payload = await body(request)
        return _receipt(await engine.weights.from_folder(_folder(payload, "model_path"), *_asked(payload)))

    async def from_chain(request: web.Request) -> web.Response:
        payload = await body(request)
        if "changes" in payload:
            return _receipt(await engine.weights.from_changes(_folder(payload, "changes"), *_asked(payload)))
        return _receipt(await engine.weights.from_chain(_folder(payload, "chain"), *_asked(payload)))

    async def from_shared_memory(request: web.Request) -> web.Response:
        payload = await body(request)
        if not isinstance(payload.get("manifest"), str):
            raise BadRequest("give manifest: the path of the JSON file that describes the buffer")
        return _receipt(await engine.weights.from_manifest(Path(payload["manifest"]), *_asked(payload)))

    async def from_buckets(request: web.Request) -> web.Response:
        payload = await body(request)
        if not isinstance(payload.get("buckets"), list):
            raise BadRequest("give buckets: a list of what sync.buckets makes")
        return _receipt(await engine.weights.from_buckets(payload["buckets"], *_asked(payload)))

    async def version(request: web.Request) -> web.Response:
        return reply({"weight_version": engine.info()["weight_version"]})

    async def mark(request: web.Request) -> web.Response:
        return reply(await _mark(engine))

    async def digests(request: web.Request) -> web.Response:
        return reply({"digests": await engine.digests()})

    return [
        ("POST", "/update_weights_from_disk", from_disk),
        ("POST", "/update_weights_from_chain", from_chain),
        ("POST", "/update_weights_from_shared_memory", from_shared_memory),
        ("POST", "/update_weights_from_buckets", from_buckets),
        ("GET", "/get_weight_version", version),
        ("GET", "/weight_version", version),
        ("GET", "/weights_fingerprint", mark),
        ("GET", "/weights_digests", digests),
    ]


def _part_routes(engine: EmbeddedEngine, allow_pickle: bool) -> list[tuple[str, str, Handler]]:
    """Updates in parts, between begin and end."""

    async def begin(request: web.Request) -> web.Response:
        await engine.weights.begin(_asked(await body(request))[1])
        return reply({"success": True, "message": "weight update begun"})

    async def end(request: web.Request) -> web.Response:
        await engine.weights.end()
        return reply({"success": True, "message": "weight update ended", **await _mark(engine)})

    async def from_tensor(request: web.Request) -> web.Response:
        payload = await body(request)
        _require_begin(engine)
        parts, kind = payload.get("serialized_named_tensors"), str(payload.get("load_format") or "")
        tensors = weights.from_base64(parts, kind, allow_pickle=allow_pickle)
        return _receipt(await engine.weights.from_tensors(tensors, *_asked(payload)))

    async def from_distributed(request: web.Request) -> web.Response:
        payload = await body(request)
        _require_begin(engine)
        return _receipt(await engine.weights.from_group(payload, *_asked(payload)))

    async def join(request: web.Request) -> web.Response:
        await engine.join_group(await body(request))
        return reply({"success": True, "message": "joined"})

    async def leave(request: web.Request) -> web.Response:
        name = (await body(request)).get("group_name", "weight_update_group")
        await engine.leave_group(str(name))
        return reply({"success": True, "message": "left"})

    return [
        ("POST", "/begin_weight_update", begin),
        ("POST", "/end_weight_update", end),
        ("POST", "/update_weights_from_tensor", from_tensor),
        ("POST", "/update_weights_from_distributed", from_distributed),
        ("POST", "/init_weights_update_group", join),
        ("POST", "/destroy_weights_update_group", leave),
    ]


def _require_begin(engine: EmbeddedEngine) -> None:
    if not engine.weights.updating:
        raise BadRequest("no weight update is in progress", "POST /begin_weight_update first, /end_weight_update after")


async def _mark(engine: EmbeddedEngine) -> dict[str, Any]:
    return {"fingerprint": await engine.fingerprint(), "version": engine.info()["weight_version"]}


def _memory_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    async def tags(request: web.Request) -> tuple[str, ...]:
        given = (await body(request)).get("tags")
        if not isinstance(given, list | None):
            raise BadRequest(f"tags = {given!r} must be a list", f"use {', '.join(TAGS)}")
        names = tuple(TAGS if given is None else given)
        unknown = [t for t in names if t not in TAGS]
        if unknown:
            raise BadRequest(f"unknown memory tag {unknown[0]!r}", f"use {', '.join(TAGS)}")
        return names

    async def release(request: web.Request) -> web.Response:
        await engine.sleep(await tags(request))
        return reply({"success": True, "message": "released"})

    async def take(request: web.Request) -> web.Response:
        await engine.wake(await tags(request))
        return reply({"success": True, "message": "resumed"})

    handlers = {"/release_memory_occupation": release, "/resume_memory_occupation": take}
    return [(method, path, handler) for path, handler in handlers.items() for method in ("GET", "POST")]
