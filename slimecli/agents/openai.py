"""/v1/chat/completions and /v1/completions over any engine: tools, sessions, streaming."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from slimecli.agents.chat import Answer, Ask, Chat, Pending, stable_text
from slimecli.agents.text_engine import TextEngine
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
from slimecli.engines.embedded.generation import send_events
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, reply
from slimecli.engines.embedded.text import RESERVED
from slimecli.errors import nearest
from slimecli.types import Message

_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "n": "n", "stop": "stop",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty", "seed": "sampling_seed", "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos", "min_tokens": "min_new_tokens", "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim", "logit_bias": "logit_bias",
}  # fmt: skip
"""OpenAI's name -> the engine's"""
_KINDS: Shapes = {
    "chat_template_kwargs": (dict,), "logprobs": (bool, int), "max_completion_tokens": (int,), "max_tokens": (int,),
    "parallel_tool_calls": (bool,),
    "response_format": (dict,), "rid": (str,), "separate_reasoning": (bool,), "stop": (str, list),
    "stream": (bool,), "stream_options": (dict,), "tool_choice": (str, dict), "top_logprobs": (int,),
}  # fmt: skip
"""what is taken apart here; numbers are the engine's to check"""
_OWN = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs",
    "top_logprobs", "tools", "chat_template_kwargs", "rid", "user", "echo", "suffix", "tool_choice", "metadata",
    "store", "parallel_tool_calls", "separate_reasoning", "session_id", "response_format", "prompt_cache_key",
    "safety_identifier", "service_tier", "reasoning_effort", "verbosity",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What shapes the reply to one request."""

    chat: bool
    model: str
    id: str
    created: int
    logprobs: bool
    usage_in_stream: bool


def routes(chat: Chat, *, key_is_session: bool = False) -> list[tuple[str, str, Handler]]:
    """(method, path, handler).

    Args:
        key_is_session: the bearer token of a request names its session.
    """
    engine = chat.engine

    async def chatting(request: web.Request) -> web.StreamResponse:
        data = await asked(request)
        call = _call(engine, data, chat=True)
        pending = chat.prepare(ask_of(data, session_of(request, data, key_is_session)))
        headers = {SESSION_HEADER: pending.session.id} if pending.session else {}
        if data.get("stream"):
            return await send_events(request, chat_chunks(chat, call, pending), headers)
        answer = reply(chat_completion(chat, call, await chat.answer(pending)))
        answer.headers.update(headers)
        return answer

    async def completing(request: web.Request) -> web.StreamResponse:
        data = await asked(request)
        call, payload = _call(engine, data, chat=False), _payload(engine, data)
        if data.get("stream"):
            return await send_events(request, text_chunks(engine, call, payload))
        return reply(text_completion(engine, call, await engine.generate(payload)))

    return [("POST", "/v1/chat/completions", chatting), ("POST", "/v1/completions", completing)]


# -- what is asked ---------------------------------------------------------------------------------------------------


def _call(engine: TextEngine, data: dict[str, Any], *, chat: bool) -> Call:
    """Unknown parameters that ask for something are refused by name."""
    known = [*_SAMPLING, *_OWN]
    for key, value in data.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise BadRequest(f"parameter {key!r} is not known to this engine{nearest(key, known)}")
    check_kinds(data, _KINDS)
    if data.get("echo") or data.get("suffix"):
        raise BadRequest("echo and suffix are not known to this engine")
    if (data.get("response_format") or {}).get("type", "text") != "text":
        raise BadRequest("response_format other than text is not known to this engine")
    return Call(
        chat=chat,
        model=str(data.get("model") or engine.name),
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        logprobs=data.get("logprobs") not in (None, False),
        usage_in_stream=bool((data.get("stream_options") or {}).get("include_usage")),
    )


def _params(data: dict[str, Any]) -> dict[str, Any]:
    params = {ours: data[theirs] for theirs, ours in _SAMPLING.items() if data.get(theirs) is not None}
    limits = (data.get("max_completion_tokens"), data.get("max_tokens"))
    params["max_new_tokens"] = next((limit for limit in limits if limit is not None), None)
    return params


def ask_of(data: dict[str, Any], session: str = "") -> Ask:
    """A chat request, translated."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a list of objects with role and content")
    choice = data.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        check_function(choice.get("function"), "parameters")
        choice = choice["function"]["name"]
    tools = objects(data.get("tools"), "tools")
    for tool in tools:
        check_function(tool.get("function", tool), "parameters")
    template = {k: data[k] for k in ("reasoning_effort",) if data.get(k)} | (data.get("chat_template_kwargs") or {})
    if reserved := sorted(RESERVED & set(template)):
        raise BadRequest(f"chat_template_kwargs: {reserved[0]} is not the caller's to set")
    return Ask(
        messages=[template_message(m) for m in messages],
        tools=tools,
        tool_choice=choice,
        parallel=data.get("parallel_tool_calls") is not False,
        params=_params(data),
        template=template,
        logprobs=data.get("logprobs") not in (None, False),
        top_logprobs=data.get("top_logprobs") or 0,
        think=bool(data.get("separate_reasoning")),
        rid=data.get("rid") or "",
        session=session,
    )


def template_message(message: Message) -> Message:
    """One of OpenAI's messages as chat templates take it."""
    kept = {
        k: v for k, v in message.items() if k not in ("tool_calls", "refusal", "annotations", "audio") and v is not None
    }
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"a message has no role: {json.dumps(message)[:200]}")
    kept["content"] = plain_text(message.get("content"))
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if calls := objects(message.get("tool_calls"), "tool_calls"):
        kept["tool_calls"] = [_template_call(c) for c in calls]
    return kept


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"a tool call has no function name: {json.dumps(call)[:200]}")
    arguments = function.get("arguments") or {}
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": json_or_text(arguments)},
    }


def _payload(engine: TextEngine, data: dict[str, Any]) -> dict[str, Any]:
    """A /v1/completions request for /generate. OpenAI's budget is 16 there."""
    params = _params(data)
    if params["max_new_tokens"] is None:
        params["max_new_tokens"] = 16
    payload = {
        "input_ids": _prompt_ids(engine, data.get("prompt")),
        "sampling_params": params,
        "return_logprob": data.get("logprobs") not in (None, False),
        "top_logprobs_num": int(data.get("logprobs") or 0),
        "stream": bool(data.get("stream")),
    }
    return payload if data.get("rid") is None else {**payload, "rid": data["rid"]}


def _prompt_ids(engine: TextEngine, prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return engine.codec.encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
        return [engine.codec.encode(p) for p in prompt]
    if isinstance(prompt, list) and prompt:
        return prompt
    raise BadRequest("prompt must be a string, a list of strings, or token ids")


# -- what is answered ------------------------------------------------------------------------------------------------


def chat_completion(chat: Chat, call: Call, answers: list[Answer]) -> dict[str, Any]:
    """A whole answer."""
    choices = []
    for a in answers:
        message = {"role": "assistant", "content": a.content, "tool_calls": wire_calls(a) or None}
        if a.thinking:
            message["reasoning_content"] = a.thinking
        if a.calls and not a.content:
            message["content"] = None
        probs = _chat_logprobs(chat.engine, a.item, 0) if call.logprobs else None
        choice = {"index": a.index, "finish_reason": a.reason, "matched_stop": _matched(a.item), "logprobs": probs}
        choices.append({**choice, "message": message})
    return {**_head(call, "chat.completion"), "choices": choices, "usage": usage([a.item for a in answers])}


def wire_calls(answer: Answer) -> list[dict[str, Any]]:
    """Tool calls as OpenAI writes them."""
    return [
        {"id": id_, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for id_, c in zip(answer.ids, answer.calls, strict=True)
    ]


async def chat_chunks(chat: Chat, call: Call, pending: Pending) -> AsyncIterator[dict[str, Any]]:
    """A streamed answer: what is new since the last event. Calls come whole, once they can be read."""
    sent: dict[int, Answer] = {}
    last: dict[int, dict[str, Any]] = {}
    async with aclosing(chat.stream(pending)) as answers:
        async for answer in answers:
            before = sent.get(answer.index)
            delta: dict[str, Any] = {} if before else {"role": "assistant"}
            delta |= _new("reasoning_content", before.thinking if before else "", answer.thinking)
            delta |= _new("content", before.content if before else "", answer.content)
            if answer.calls:
                delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(wire_calls(answer))]
            elif before is None:
                delta.setdefault("content", "")
            last[answer.index] = answer.item
            if not delta and answer.reason is None:
                continue
            choice: dict[str, Any] = {"index": answer.index, "finish_reason": answer.reason, "delta": delta}
            start = len(before.item["output_ids"]) if before else 0
            choice["logprobs"] = _chat_logprobs(chat.engine, answer.item, start) if call.logprobs else None
            sent[answer.index] = answer
            yield {**_head(call, "chat.completion.chunk"), "choices": [choice]}
    if call.usage_in_stream:
        yield {**_head(call, "chat.completion.chunk"), "choices": [], "usage": usage(list(last.values()))}


def _new(name: str, before: str, now: str) -> dict[str, str]:
    """What a text has gained."""
    piece = now[len(before) :]
    return {name: piece} if piece else {}


def text_completion(engine: TextEngine, call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer of /v1/completions."""
    choices = [
        {
            "index": index,
            "finish_reason": _reason(item),
            "matched_stop": _matched(item),
            "logprobs": _text_logprobs(engine, item, 0) if call.logprobs else None,
            "text": item["text"],
        }
        for index, item in enumerate(found)
    ]
    return {**_head(call, "text_completion"), "choices": choices, "usage": usage(found)}


async def text_chunks(engine: TextEngine, call: Call, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A streamed answer of /v1/completions."""
    sent: dict[int, tuple[int, int]] = {}
    last: dict[int, dict[str, Any]] = {}
    async with aclosing(engine.stream(payload)) as items:
        async for item in items:
            index, reason = item["index"], _reason(item)
            chars, tokens = sent.get(index, (0, 0))
            text = item["text"] if reason else stable_text(item["text"], payload["sampling_params"].get("stop"))
            last[index] = item
            if not text[chars:] and reason is None and index in sent:
                continue
            choice: dict[str, Any] = {"index": index, "finish_reason": reason, "text": text[chars:]}
            choice["logprobs"] = _text_logprobs(engine, item, tokens) if call.logprobs else None
            sent[index] = (max(chars, len(text)), len(item["output_ids"]))
            yield {**_head(call, "text_completion"), "choices": [choice]}
    if call.usage_in_stream:
        yield {**_head(call, "text_completion"), "choices": [], "usage": usage(list(last.values()))}


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def _reason(item: dict[str, Any]) -> str | None:
    reason = item["meta_info"]["finish_reason"]
    return reason["type"] if reason else None


def _matched(item: dict[str, Any]) -> Any:
    reason = item["meta_info"]["finish_reason"]
    return reason.get("matched") if reason else None


def usage(found: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens of the prompt and of all answers."""
    prompt = max((i["meta_info"]["prompt_tokens"] for i in found), default=0)
    said = sum(i["meta_info"]["completion_tokens"] for i in found)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _tokens(item: dict[str, Any], start: int) -> tuple[list[Any], list[Any]]:
    meta = item["meta_info"]
    triples = meta["output_token_logprobs"][start:]
    return triples, meta.get("output_top_logprobs", [])[start:] or [[] for _ in triples]


def _chat_logprobs(engine: TextEngine, item: dict[str, Any], start: int) -> dict[str, Any]:
    triples, tops = _tokens(item, start)
    name = _namer(engine)
    return {
        "content": [
            {**name(t, p), "top_logprobs": [name(i, q) for q, i, _ in top]}
            for (p, t, _), top in zip(triples, tops, strict=True)
        ]
    }


def _text_logprobs(engine: TextEngine, item: dict[str, Any], start: int) -> dict[str, Any]:
    triples, tops = _tokens(item, start)
    name = _namer(engine)
    return {
        "tokens": [name(t, p)["token"] for p, t, _ in triples],
        "token_logprobs": [p for p, _, _ in triples],
        "top_logprobs": [{name(i, q)["token"]: q for q, i, _ in top} for top in tops],
    }


def _namer(engine: TextEngine) -> Callable[[int, float], dict[str, Any]]:
    def name(token: int, log_prob: float) -> dict[str, Any]:
        text = engine.codec.decode([[token]], False)[0]
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    return name
