"""Anthropic's /v1/messages and /v1/messages/count_tokens over any engine: tools, sessions, streaming."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import web

from slimecli.agents.chat import Answer, Ask, Chat, Pending
from slimecli.agents.wire import (
    SESSION_HEADER,
    Shapes,
    asked,
    check_function,
    check_kinds,
    json_or_text,
    objects,
    plain_text,
    session_of,
)
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, reply
from slimecli.errors import SlimeError, nearest
from slimecli.types import Message

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "max_tokens": "max_new_tokens",
}
"""Anthropic's name -> the engine's"""
_KINDS: Shapes = {
    "max_tokens": (int,),
    "stop_sequences": (list,),
    "stream": (bool,),
    "thinking": (dict,),
    "tool_choice": (dict,),
}
_OWN = {
    "model", "messages", "system", "tools", "tool_choice", "stream", "metadata", "thinking", "session_id",
    "service_tier", "betas", "context_management", "output_config", "container",
}  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


def routes(chat: Chat, *, key_is_session: bool = False) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""

    async def messages(request: web.Request) -> web.StreamResponse:
        data = await asked(request)
        pending = chat.prepare(ask_of(data, session_of(request, data, key_is_session)))
        headers = {SESSION_HEADER: pending.session.id} if pending.session else {}
        name = str(data.get("model") or chat.engine.name)
        if data.get("stream"):
            return await _send(request, events(chat, pending, name), headers)
        (answer,) = await chat.answer(pending)
        found = reply(message(answer, name))
        found.headers.update(headers)
        return found

    async def count(request: web.Request) -> web.Response:
        ask = ask_of(await asked(request))
        extra = {"tools": ask.tools} if ask.tools else {}
        return reply({"input_tokens": len(chat.engine.codec.chat(ask.messages, extra.get("tools"), ask.template))})

    return [("POST", "/v1/messages", messages), ("POST", "/v1/messages/count_tokens", count)]


# -- what is asked ---------------------------------------------------------------------------------------------------


def ask_of(data: dict[str, Any], session: str = "") -> Ask:
    """A request, translated. Unknown parameters that ask for something are refused by name."""
    known = [*_SAMPLING, *_OWN]
    for key, value in data.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise BadRequest(f"parameter {key!r} is not known to this engine{nearest(key, known)}")
    check_kinds(data, _KINDS)
    stated = data.get("messages")
    if not isinstance(stated, list) or not stated or not all(isinstance(m, dict) for m in stated):
        raise BadRequest("messages must be a list of objects with role and content")
    messages = [{"role": "system", "content": _text(data["system"])}] if data.get("system") else []
    for item in stated:
        messages += _messages(item)
    choice = data.get("tool_choice") or {}
    kind = str(choice.get("type") or "auto")
    return Ask(
        messages=messages,
        tools=[_tool(t) for t in objects(data.get("tools"), "tools")],
        tool_choice={"any": "required", "tool": str(choice.get("name") or "")}.get(kind, kind),
        parallel=not choice.get("disable_parallel_tool_use"),
        params={ours: data[theirs] for theirs, ours in _SAMPLING.items() if data.get(theirs) is not None},
        template={"enable_thinking": False} if (data.get("thinking") or {}).get("type") == "disabled" else {},
        think=True,
        session=session,
    )


def _text(content: Any) -> str:
    return plain_text(content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise BadRequest(f"tool {tool.get('name')!r} has no input_schema: only tools that the client runs are known")
    check_function(tool, "input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _messages(item: Message) -> list[Message]:
    """One of Anthropic's messages as chat templates take it: each tool result is a message of its own."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"role {role!r} is not user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content)}]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    found: list[Message] = []
    thinking = ""
    for part in objects(content, "content"):
        kind = part.get("type")
        if kind == "tool_result":
            found.append(
                {"role": "tool", "tool_call_id": part.get("tool_use_id", ""), "content": _text(part.get("content"))}
            )
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": json_or_text(part.get("input") or {})}
            calls.append({"id": part.get("id", ""), "type": "function", "function": function})
        elif kind == "thinking":
            thinking += str(part.get("thinking", ""))
        elif kind != "redacted_thinking":
            texts.append(part)
    own: Message = {"role": role, "content": _text(texts)}
    if calls:
        own["tool_calls"] = calls
    if thinking:
        own["reasoning_content"] = thinking
    return found + ([own] if texts or calls or thinking or not found else [])


# -- what is answered ------------------------------------------------------------------------------------------------


def message(answer: Answer, model: str) -> dict[str, Any]:
    """A whole answer."""
    content: list[dict[str, Any]] = []
    if answer.thinking:
        content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.content or not answer.calls:
        content.append({"type": "text", "text": answer.content})
    content += [
        {"type": "tool_use", "id": _tool_id(id_), "name": c.name, "input": c.arguments}
        for id_, c in zip(answer.ids, answer.calls, strict=True)
    ]
    return {**_head(model), "content": content, **_end(answer), "usage": _usage(answer.item)}


def _tool_id(id_: str) -> str:
    return f"toolu_{id_.removeprefix('call_')}"


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _end(answer: Answer) -> dict[str, Any]:
    reason, matched = answer.reason or "stop", None
    stopped = answer.item["meta_info"]["finish_reason"] or {}
    if reason == "stop" and isinstance(stopped.get("matched"), str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped["matched"]}
    return {"stop_reason": _REASONS[reason], "stop_sequence": matched}


def _usage(item: dict[str, Any]) -> dict[str, int]:
    meta = item["meta_info"]
    return {"input_tokens": meta["prompt_tokens"], "output_tokens": meta["completion_tokens"]}


class _Blocks:
    """Content blocks of a streamed message, opened and closed one after the other."""

    def __init__(self) -> None:
        self._number = -1
        self._kind = ""
        self._sent = {"thinking": 0, "text": 0}

    def text(self, kind: str, now: str) -> list[dict[str, Any]]:
        """Events for what a text or thinking has gained."""
        piece = now[self._sent[kind] :]
        if not piece:
            return []
        self._sent[kind] = len(now)
        begin = [] if self._kind == kind else self.begin(kind, {"type": kind, kind: ""})
        return [*begin, self._delta({"type": f"{kind}_delta", kind: piece})]

    def call(self, id_: str, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Events for one call."""
        block = {"type": "tool_use", "id": _tool_id(id_), "name": name, "input": {}}
        piece = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        return [*self.begin("tool_use", block), self._delta(piece)]

    def begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Events that end the block before and begin another."""
        end = self.end()
        self._number, self._kind = self._number + 1, kind
        return [*end, {"type": "content_block_start", "index": self._number, "content_block": block}]

    def end(self) -> list[dict[str, Any]]:
        """Events that end the open block."""
        found = [{"type": "content_block_stop", "index": self._number}] if self._kind else []
        self._kind = ""
        return found

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._number, "delta": delta}


async def events(chat: Chat, pending: Pending, model: str) -> AsyncIterator[dict[str, Any]]:
    """A streamed answer, in Anthropic's events."""
    blocks, begun = _Blocks(), False
    async with aclosing(chat.stream(pending)) as answers:
        async for answer in answers:
            if not begun:
                begun = True
                usage = {**_usage(answer.item), "output_tokens": 0}
                yield {"type": "message_start", "message": {**_head(model), "content": [], "usage": usage}}
            for event in blocks.text("thinking", answer.thinking) + blocks.text("text", answer.content):
                yield event
            if answer.reason is None:
                continue
            for id_, call in zip(answer.ids, answer.calls, strict=True):
                for event in blocks.call(id_, call.name, call.arguments):
                    yield event
            for event in blocks.end():
                yield event
            yield {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer.item)}
    yield {"type": "message_stop"}


async def _send(
    request: web.Request, found: AsyncIterator[dict[str, Any]], headers: dict[str, str]
) -> web.StreamResponse:
    """Server-sent events with names. The first is awaited before the status line, so errors keep theirs."""
    iterator = aiter(found)
    first = await anext(iterator)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await response.prepare(request)
    try:
        await response.write(_event(first))
        async for event in iterator:
            await response.write(_event(event))
    except SlimeError as error:
        await response.write(_event({"type": "error", "error": {"type": "api_error", "message": str(error)}}))
    await response.write_eof()
    return response


def _event(data: dict[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
