"""Abort, pause, weights and memory: SGLang's control calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from slimecli.engines.embedded import weights
from slimecli.engines.embedded.engine import TAGS, EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, body, failure, reply
from slimecli.errors import SlimeError
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
        }
    )


async def _prepare(engine: EmbeddedEngine, payload: dict[str, Any]) -> str | None:
    """Do what an update asks for beforehand; the version it names. Prompt caches are dropped by every update."""
    if payload.get("abort_all_requests"):
        await engine.abort()
    value = payload.get("weight_version")
    return None if value is None else str(value)


def _weight_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    """Whole updates, and what is held."""

    async def from_disk(request: web.Request) -> web.Response:
        payload = await body(request)
        folder = Path(str(payload.get("model_path") or ""))
        if not payload.get("model_path") or not folder.is_dir():
            raise BadRequest(f"model_path {payload.get('model_path')!r} is not a folder on this machine")
        return _receipt(await engine.update_from_folder(folder, await _prepare(engine, payload)))

    async def from_shared_memory(request: web.Request) -> web.Response:
        payload = await body(request)
        if not isinstance(payload.get("manifest"), str):
            raise BadRequest("give manifest: the path of the JSON file that describes the buffer")
        manifest = Path(payload["manifest"])
        return _receipt(await engine.update_from_manifest(manifest, await _prepare(engine, payload)))

    async def version(request: web.Request) -> web.Response:
        return reply({"weight_version": engine.info()["weight_version"]})

    async def mark(request: web.Request) -> web.Response:
        return reply(await _mark(engine))

    return [
        ("POST", "/update_weights_from_disk", from_disk),
        ("POST", "/update_weights_from_shared_memory", from_shared_memory),
        ("GET", "/get_weight_version", version),
        ("GET", "/weight_version", version),
        ("GET", "/weights_fingerprint", mark),
    ]


def _part_routes(engine: EmbeddedEngine, allow_pickle: bool) -> list[tuple[str, str, Handler]]:
    """Updates in parts, between begin and end."""

    async def begin(request: web.Request) -> web.Response:
        await engine.begin_update()
        return reply({"success": True, "message": "weight update begun"})

    async def end(request: web.Request) -> web.Response:
        await engine.end_update()
        return reply({"success": True, "message": "weight update ended", **await _mark(engine)})

    async def from_tensor(request: web.Request) -> web.Response:
        payload = await body(request)
        _require_begin(engine)
        parts, kind = payload.get("serialized_named_tensors"), str(payload.get("load_format") or "")
        tensors = weights.from_base64(parts, kind, allow_pickle=allow_pickle)
        return _receipt(await engine.update_from_tensors(tensors, await _prepare(engine, payload)))

    async def from_distributed(request: web.Request) -> web.Response:
        payload = await body(request)
        _require_begin(engine)
        return _receipt(await engine.update_from_group(payload, await _prepare(engine, payload)))

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
    if not engine.updating:
        raise BadRequest("no weight update is in progress", "POST /begin_weight_update first, /end_weight_update after")


async def _mark(engine: EmbeddedEngine) -> dict[str, Any]:
    return {"fingerprint": await engine.fingerprint(), "version": engine.info()["weight_version"]}


def _memory_routes(engine: EmbeddedEngine) -> list[tuple[str, str, Handler]]:
    async def tags(request: web.Request) -> tuple[str, ...]:
        given = (await body(request)).get("tags")
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
