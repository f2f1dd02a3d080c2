"""What OpenAI's and Anthropic's protocols share: who speaks, and contents as text."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from slimecli.engines.embedded.request import BadRequest

SESSION_HEADER = "x-session-id"
ROUTING_HEADER = "X-SMG-Routing-Key"
"""a router's name for the same thing"""


def bearer(request: web.Request) -> str:
    """The key of a request, as either protocol states it."""
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def session_of(request: web.Request, data: dict[str, Any], key_is_session: bool) -> str:
    """Which session a request belongs to; empty: it does not say."""
    stated = data.get("metadata")
    metadata: dict[str, Any] = stated if isinstance(stated, dict) else {}
    found = (
        request.headers.get(SESSION_HEADER)
        or request.headers.get(ROUTING_HEADER)
        or data.get("session_id")
        or metadata.get("session_id")
        or (bearer(request) if key_is_session else "")
        or data.get("user")
        or metadata.get("user_id")
    )
    return str(found or "")


def plain_text(content: Any) -> str:
    """The text of a message's content, which may come in parts; anything that is no text is refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"content must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"a content part of type {kind!r} is not known to this engine: it reads text")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def json_or_text(value: Any) -> Any:
    """Arguments as an object where they are one; models are told what they said in any case."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
