"""What OpenAI's and Anthropic's protocols share: who speaks, and contents as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import body
from slimecli.engines.http import ROUTING_HEADER

SESSION_HEADER = "x-session-id"

MAX_SESSION_ID = 512
"""longest name of a session (characters): it is sent back as a header"""
MOST_NESTED = 100
"""lists and objects inside each other in a request: what follows reads and writes them by recursion"""
Shapes = Mapping[str, tuple[type, ...]]
"""parameter -> the kinds of JSON it may be"""
_SAID = {str: "text", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}


async def asked(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request, nested no deeper than chat templates and JSON's writers go."""
    data = await body(request)
    level: list[Any] = [data]
    for _ in range(MOST_NESTED):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [value for values in inner for value in values if isinstance(value, list | dict)]
        if not level:
            return data
    raise BadRequest(f"the body has lists and objects in each other, more than {MOST_NESTED} deep")


def check_kinds(data: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse, by name, a parameter of another kind than its own. One that is absent or null says nothing."""
    for key, kinds in shapes.items():
        value = data.get(key)
        wrong = isinstance(value, bool) and bool not in kinds  # True is an int to Python
        if value is not None and (wrong or not isinstance(value, kinds)):
            raise BadRequest(f"{key} = {_short(value)} must be {' or '.join(_SAID[k] for k in kinds)}")


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{what} must be a list of objects, not {_short(value)}")
    return value


def check_function(function: Any, schema: str) -> None:
    """A tool's name and the schema of its parameters.

    Args:
        schema: what the protocol calls it.
    """
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise BadRequest(f"a tool is an object with a name, not {_short(function)}")
    stated = function.get(schema) or {}
    if not isinstance(stated, dict) or not isinstance(stated.get("properties") or {}, dict):
        raise BadRequest(f"tool {name!r}: {schema} must be a JSON schema, an object with properties")


def _short(value: Any) -> str:
    return json.dumps(value)[:200]


def bearer(request: web.Request) -> str:
    """The key of a request, as either protocol states it."""
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def session_of(request: web.Request, data: dict[str, Any], key_is_session: bool) -> str:
    """Which session a request belongs to; empty: it does not say."""
    stated = data.get("metadata")
    metadata: dict[str, Any] = stated if isinstance(stated, dict) else {}
    found = (
        request.headers.get(SESSION_HEADER),
        request.headers.get(ROUTING_HEADER),
        data.get("session_id"),
        metadata.get("session_id"),
        bearer(request) if key_is_session else None,
        data.get("user"),
        metadata.get("user_id"),
    )
    return next((name for name in map(session_name, found) if name), "")


def session_name(stated: Any) -> str:
    """A session's name, as it can be sent in a header; empty: there is none."""
    if stated is None:
        return ""
    if isinstance(stated, bool) or not isinstance(stated, str | int):
        raise BadRequest(f"a session's name is text or a number, not {_short(stated)}")
    name = str(stated)
    if len(name) > MAX_SESSION_ID or not name.isprintable():
        raise BadRequest(f"a session's name is at most {MAX_SESSION_ID} printable characters, not {name[:80]!r}")
    return name


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
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"a content part has no text: {_short(part)}")
        texts.append(part["text"])
    return "".join(texts)


def json_or_text(value: Any) -> Any:
    """Arguments as an object where they are one; models are told what they said in any case."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
