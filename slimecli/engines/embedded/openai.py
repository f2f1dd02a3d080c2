"""/v1/chat/completions and /v1/completions, written in terms of /generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.generation import send_events
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, body, reply
from slimecli.errors import nearest

_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "n": "n", "stop": "stop",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty", "seed": "sampling_seed", "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos", "min_tokens": "min_new_tokens", "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim", "logit_bias": "logit_bias",
}  # fmt: skip
"""OpenAI's name -> the engine's"""
_OWN = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs",
    "top_logprobs", "tools", "chat_template_kwargs", "rid", "user", "echo", "suffix", "tool_choice", "metadata",
    "store",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One OpenAI request, translated."""

    payload: dict[str, Any]
    """for /generate"""
    chat: bool
    model: str
    id: str
    created: int
    logprobs: bool
    usage_in_stream: bool


def routes(engine: EmbeddedEngine, allow_pickle: bool) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""

    def handler(chat: bool) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            call = translate(engine, await body(request), chat=chat)
            if call.payload.get("stream"):
                return await send_events(request, chunks(engine, call))
            found = await engine.generate(call.payload)
            return reply(completion(engine, call, found if isinstance(found, list) else [found]))

        return handle

    return [("POST", "/v1/chat/completions", handler(True)), ("POST", "/v1/completions", handler(False))]


def translate(engine: EmbeddedEngine, data: dict[str, Any], *, chat: bool) -> Call:
    """OpenAI's parameters -> a /generate payload. Unknown ones that ask for something are refused by name."""
    known = [*_SAMPLING, *_OWN]
    for key, value in data.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise BadRequest(f"parameter {key!r} is not known to this engine{nearest(key, known)}")
    if data.get("echo") or data.get("suffix"):
        raise BadRequest("echo and suffix are not known to this engine")
    ids = _chat_ids(engine, data) if chat else _prompt_ids(engine, data.get("prompt"))
    params = {ours: data[theirs] for theirs, ours in _SAMPLING.items() if data.get(theirs) is not None}
    budget = data.get("max_completion_tokens") or data.get("max_tokens")
    longest = len(ids) if ids and isinstance(ids[0], int) else max(map(len, ids), default=0)
    # OpenAI's chat has no budget by default: what the context leaves; its completions have 16
    params["max_new_tokens"] = budget or (max(engine.limits.max_context - longest, 0) if chat else 16)
    asked = data.get("logprobs")
    tops = int(data.get("top_logprobs") or 0) if chat else int(asked or 0)
    payload = {
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": asked not in (None, False),
        "top_logprobs_num": tops,
        "stream": bool(data.get("stream")),
    }
    if data.get("rid") is not None:
        payload["rid"] = data["rid"]
    return Call(
        payload=payload,
        chat=chat,
        model=str(data.get("model") or engine.model_dir),
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        logprobs=asked not in (None, False),
        usage_in_stream=bool((data.get("stream_options") or {}).get("include_usage")),
    )


def _chat_ids(engine: EmbeddedEngine, data: dict[str, Any]) -> list[int]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a list of objects with role and content")
    return engine.codec.chat(messages, data.get("tools"), data.get("chat_template_kwargs") or {})


def _prompt_ids(engine: EmbeddedEngine, prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return engine.codec.encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
        return [engine.codec.encode(p) for p in prompt]
    if isinstance(prompt, list) and prompt:
        return prompt
    raise BadRequest("prompt must be a string, a list of strings, or token ids")


def completion(engine: EmbeddedEngine, call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer."""
    choices = []
    for index, item in enumerate(found):
        choice: dict[str, Any] = {"index": index, "finish_reason": _reason(item), "matched_stop": _matched(item)}
        choice["logprobs"] = _logprobs(engine, call, item, 0) if call.logprobs else None
        if call.chat:
            choice["message"] = {"role": "assistant", "content": item["text"], "tool_calls": None}
        else:
            choice["text"] = item["text"]
        choices.append(choice)
    kind = "chat.completion" if call.chat else "text_completion"
    return {**_head(call, kind), "choices": choices, "usage": _usage(found)}


async def chunks(engine: EmbeddedEngine, call: Call) -> AsyncIterator[dict[str, Any]]:
    """A streamed answer: what is new since the last event."""
    kind = "chat.completion.chunk" if call.chat else "text_completion"
    sent: dict[int, tuple[int, int]] = {}
    last: dict[int, dict[str, Any]] = {}
    async for item in engine.stream(call.payload):
        index = item["index"]
        chars, tokens = sent.get(index, (0, 0))
        reason = _reason(item)
        text = stable_text(engine, call, item["text"], done=reason is not None)
        piece = text[chars:]
        last[index] = item
        if not piece and reason is None and index in sent:
            continue
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if call.chat:
            choice["delta"] = {"content": piece} | ({} if index in sent else {"role": "assistant"})
        else:
            choice["text"] = piece
        choice["logprobs"] = _logprobs(engine, call, item, tokens) if call.logprobs else None
        sent[index] = (max(chars, len(text)), len(item["output_ids"]))
        yield {**_head(call, kind), "choices": [choice]}
    if call.usage_in_stream:
        yield {**_head(call, kind), "choices": [], "usage": _usage(list(last.values()))}


def stable_text(engine: EmbeddedEngine, call: Call, text: str, *, done: bool) -> str:
    """The part that later tokens cannot change: no half character, no beginning of a stop string."""
    if done:
        return text
    text = text.rstrip("\ufffd")
    stops = call.payload["sampling_params"].get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        held = max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        text = text[: len(text) - held]
    return text


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def _reason(item: dict[str, Any]) -> str | None:
    reason = item["meta_info"]["finish_reason"]
    return reason["type"] if reason else None


def _matched(item: dict[str, Any]) -> Any:
    reason = item["meta_info"]["finish_reason"]
    return reason.get("matched") if reason else None


def _usage(found: list[dict[str, Any]]) -> dict[str, int]:
    prompt = max((i["meta_info"]["prompt_tokens"] for i in found), default=0)
    said = sum(i["meta_info"]["completion_tokens"] for i in found)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _logprobs(engine: EmbeddedEngine, call: Call, item: dict[str, Any], start: int) -> dict[str, Any]:
    """OpenAI's two shapes: `content` for chat, parallel lists for completions."""
    meta = item["meta_info"]
    triples = meta["output_token_logprobs"][start:]
    tops = meta.get("output_top_logprobs", [])[start:] or [[] for _ in triples]
    name = _namer(engine)
    if call.chat:
        return {
            "content": [
                {**name(t, p), "top_logprobs": [name(i, q) for q, i, _ in top]}
                for (p, t, _), top in zip(triples, tops, strict=True)
            ]
        }
    return {
        "tokens": [name(t, p)["token"] for p, t, _ in triples],
        "token_logprobs": [p for p, _, _ in triples],
        "top_logprobs": [{name(i, q)["token"]: q for q, i, _ in top} for top in tops],
    }


def _namer(engine: EmbeddedEngine) -> Callable[[int, float], dict[str, Any]]:
    def name(token: int, log_prob: float) -> dict[str, Any]:
        text = engine.codec.decode([[token]], False)[0]
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    return name
