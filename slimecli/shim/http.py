"""slime's HTTP helpers. A request to our own engine goes to it directly: balanced, with its retries and deadline."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import threading
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from slimecli.data_tools.rewards.http import post_json
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.rollout.args import HookArgs
from slimecli.shim.calls import calling

ROUTING_HEADER = "x-smg-routing-key"
MOST_RETRIES = 5


def _own_engine(url: str) -> RolloutEngine | None:
    """The engine that a URL made of args means."""
    args: HookArgs | None = calling.get()
    if args is None or args.engine is None:
        return None
    place = urlsplit(url)
    own = f"{args.sglang_router_ip}:{args.sglang_router_port}"
    engine: RolloutEngine | None = args.engine if (place.netloc, place.path) == (own, "/generate") else None
    return engine


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None, **kwargs: Any
) -> Any:
    """The JSON that a server answers."""
    engine = _own_engine(url)
    if engine is None:
        return await post_json(url, payload, min(max_retries, MOST_RETRIES), dict(headers or {}))
    key = {name.lower(): value for name, value in (headers or {}).items()}.get(ROUTING_HEADER)
    return await engine.generate({**payload, "routing_key": key} if key else payload)


async def get(url: str, **kwargs: Any) -> Any:
    """The JSON that a server answers."""
    import aiohttp

    try:
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            reply.raise_for_status()
            return await reply.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SlimeError(f"{url} gave no answer: {type(error).__name__}: {error}", "check the address") from error


def find_available_port(base_port: int) -> int:
    """A port from base_port on that nobody listens at."""
    for port in range(base_port, 65536):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise SlimeError(f"no free port from {base_port} on", "begin lower")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-plugin", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # its thread does not survive a fork


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, for plain code; it runs on a thread of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()
