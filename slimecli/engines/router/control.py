"""The router's own calls: smg's /workers, and its health."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from slimecli.engines.router.app import Gateway, Handler, reply


def routes(gateway: Gateway) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""
    return [*_health_routes(gateway), *_worker_routes(gateway)]


def _health_routes(gateway: Gateway) -> list[tuple[str, str, Handler]]:
    async def liveness(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def readiness(request: web.Request) -> web.Response:
        living, total = len(gateway.workers.living()), len(gateway.workers.all())
        if living:
            return reply({"status": "ready", "healthy_workers": living, "total_workers": total})
        return reply({"status": "not ready", "reason": "insufficient healthy workers"}, 503)

    return [
        ("GET", "/health", readiness),
        ("GET", "/health_generate", readiness),
        ("GET", "/liveness", liveness),
        ("GET", "/readiness", readiness),
    ]


def _worker_routes(gateway: Gateway) -> list[tuple[str, str, Handler]]:
    workers = gateway.workers

    async def list_all(request: web.Request) -> web.Response:
        found = [w.describe() for w in workers.all()]
        return reply({"workers": found, "total": len(found), "stats": {"regular_count": len(found)}})

    async def add(request: web.Request) -> web.Response:
        url = _url(await request.read())
        if url is None:
            return reply({"error": 'the body must be {"url": "http://..."}', "code": "INVALID_REQUEST"}, 400)
        if known := workers.by_url(url):
            text = f"Worker already exists at URL '{url}' with ID {known.id}."
            return reply({"error": text, "code": "WORKER_ALREADY_EXISTS"}, 409)
        worker = workers.add(url)
        await workers.look()
        told = {"status": "accepted", "worker_id": worker.id, "url": worker.url, "location": f"/workers/{worker.id}"}
        return reply({**told, "message": "Worker added"}, 202)

    async def show(request: web.Request) -> web.Response:
        worker = workers.find(request.match_info["id"])
        return reply(worker.describe()) if worker else _unknown(request)

    async def remove(request: web.Request) -> web.Response:
        worker = workers.find(request.match_info["id"])
        if worker is None:
            return _unknown(request)
        workers.remove(worker)
        return reply({"status": "accepted", "worker_id": worker.id, "message": "Worker removed"}, 202)

    return [
        ("GET", "/workers", list_all),
        ("POST", "/workers", add),
        ("GET", "/workers/{id}", show),
        ("DELETE", "/workers/{id}", remove),
    ]


def _unknown(request: web.Request) -> web.Response:
    return reply({"error": f"no worker {request.match_info['id']}", "code": "WORKER_NOT_FOUND"}, 404)


def _url(raw: bytes) -> str | None:
    """The http(s) address in a request to add a worker."""
    try:
        data: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    url = data.get("url") if isinstance(data, dict) else None
    parts = urlsplit(url) if isinstance(url, str) else None
    return url if parts and parts.scheme in ("http", "https") and parts.netloc else None
