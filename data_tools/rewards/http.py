"""Asking a server, with retries for what may pass. The deadline is the caller's."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from slimecli.errors import SlimeError

_PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP states after which another try may work"""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
"""seconds before the second try, and at most before any; doubled each time, plus up to as much again by chance"""


async def post_json(url: str, payload: dict[str, Any], retries: int, headers: dict[str, str] | None = None) -> Any:
    """The JSON that a server answers to a POST.

    Args:
        retries: further tries when the server cannot be reached, drops the connection, or is overloaded.
    """
    import aiohttp

    said = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for attempt in range(retries + 1):
            if attempt:
                pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
                await asyncio.sleep(pause * (1 + random.random()))
            try:
                async with session.post(url, json=payload, headers=headers) as reply:
                    status, body = reply.status, await reply.text()
            except (aiohttp.ClientError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return _decoded(body, url)
            said = f"HTTP {status}: {body[:200]}"
            if status not in _PASSING:
                break
    raise SlimeError(f"{url} gave no score after {attempt + 1} tries: {said}", "check the server and its address")


def _decoded(body: str, url: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise SlimeError(f"{url} answered {body[:100]!r}, which is not JSON", "check the address") from None


def prompt_text(prompt: Any) -> str:
    """A prompt as text; messages one after another, each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{m.get('role', '')}: {m.get('content') or ''}" for m in prompt)
