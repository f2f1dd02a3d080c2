"""What a router costs a request: the built-in one, smg and sglang-router, where installed, against the engine itself.

python -m benchmarks.router [--save]

The engines answer at once with a reply of 64 tokens to a prompt of 256, so that what is measured is the way there and
back: serial latency, requests/s with 64 in flight, and the router's own CPU seconds per request.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks import _common
from slimecli.engines.router import start_router
from slimecli.engines.router.launch import Router
from slimecli.engines.router.programs import find
from slimecli.recipe import load_recipe

ENGINES = 2
IN_FLIGHT = 64
REQUEST = {"input_ids": list(range(256)), "sampling_params": {"max_new_tokens": 64, "sampling_seed": 1}}
ANSWER = {
    "text": "x" * 200,
    "output_ids": list(range(64)),
    "meta_info": {
        "id": "0",
        "finish_reason": {"type": "length", "length": 64},
        "output_token_logprobs": [[-0.123456789 * i, i, None] for i in range(64)],
    },
}


def serve() -> None:
    """An engine that has the answer ready. Prints its address."""
    from aiohttp import web

    raw = orjson.dumps(ANSWER)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=raw, content_type="application/json")

    async def about(request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "created": 0, "owned_by": "sglang"}
        facts = {"model_path": "m", "served_model_name": "m", "is_generation": True, "version": "1"}
        return web.json_response({**facts, "object": "list", "data": [card]})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/{path:.*}", about)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(run())


async def serially(session: aiohttp.ClientSession, url: str, count: int) -> list[float]:
    """Seconds of each of `count` requests, one after the other."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        async with session.post(f"{url}/generate", json=REQUEST) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        seconds.append(time.perf_counter() - begin)
    return seconds


async def at_once(session: aiohttp.ClientSession, url: str, count: int) -> float:
    """Requests/s with IN_FLIGHT of them on the way."""
    begin = time.perf_counter()
    await asyncio.gather(*(serially(session, url, count // IN_FLIGHT) for _ in range(IN_FLIGHT)))
    return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - begin)


async def measure(urls: dict[str, str], routers: dict[str, Router], flags: argparse.Namespace) -> dict[str, Any]:
    """Every side in turns, `repeats` times over."""
    latency: dict[str, list[list[float]]] = {name: [] for name in urls}
    rate: dict[str, list[float]] = {name: [] for name in urls}
    cpu: dict[str, list[float]] = {name: [] for name in routers}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(-1, flags.repeats):
            for name, url in urls.items():
                before = _common.tree_cpu_seconds(routers[name].pid) if name in routers else 0.0
                serial = await serially(session, url, flags.requests)
                many = await at_once(session, url, flags.requests * 4)
                if number < 0:
                    continue
                latency[name].append(serial)
                rate[name].append(many)
                if name in routers:
                    used = _common.tree_cpu_seconds(routers[name].pid) - before
                    cpu[name].append(used / (flags.requests * 5))
    return {name: _side(latency[name], rate[name], cpu.get(name)) for name in urls}


def _side(latency: list[list[float]], rate: list[float], cpu: list[float] | None) -> dict[str, Any]:
    ordered = sorted(seconds for repeat in latency for seconds in repeat)
    return {
        "ms_p50": 1e3 * statistics.median(ordered),
        "ms_p50_best": 1e3 * min(statistics.median(repeat) for repeat in latency),
        "ms_p99": 1e3 * ordered[int(0.99 * len(ordered))],
        "requests_per_s": statistics.median(rate),
        "spread": _common.spread(rate),
        "cpu_us_per_request": None if cpu is None else 1e6 * statistics.median(cpu),
    }


def main() -> None:
    """Start engines and routers, measure, tell."""
    flags_of = _common.parser("what a router costs a request")
    flags_of.add_argument("--requests", type=int, default=500, help="serial requests per side and repeat")
    flags_of.add_argument("--serve", action="store_true", help="be an engine")
    flags = flags_of.parse_args()
    if flags.serve:
        return serve()
    if flags.smoke:
        flags.repeats, flags.requests = 1, IN_FLIGHT
    line = [sys.executable, "-m", "benchmarks.router", "--serve"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # smg knocks with HTTP/2 first
    engines = [subprocess.Popen(line, text=True, **quiet) for _ in range(ENGINES)]
    routers: dict[str, Router] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            addresses = [e.stdout.readline().strip() for e in engines if e.stdout is not None]
            for name in [n for n in ("builtin", "smg", "sglang") if find(n)]:
                for policy in ("round_robin", "cache_aware"):
                    recipe = load_recipe("", (f"engine.router={name!r}", f"router.policy={policy!r}"))
                    log = Path(folder) / f"{name}-{policy}.log"
                    side = f"{name} {policy}"
                    routers[side] = start_router(recipe, addresses, host="127.0.0.1", port=0, log=log)
            urls = {"direct": addresses[0], **{side: router.url for side, router in routers.items()}}
            sides = asyncio.run(measure(urls, routers, flags))
        finally:
            for router in routers.values():
                router.close()
            for engine in engines:
                engine.kill()
                engine.wait()
    _common.show("a request", [{"by": name, **side} for name, side in sides.items()])
    # of the quickest repeat: what else the machine does then can only add to it
    direct = sides["direct"]["ms_p50_best"]
    added = {name: side["ms_p50_best"] - direct for name, side in sides.items() if name != "direct"}
    ratio = sides["builtin round_robin"]["ms_p50_best"] / direct
    _common.finish("router", {"ratio": ratio, "added_ms": added, "sides": sides}, save=flags.save)
    return None


if __name__ == "__main__":
    main()
