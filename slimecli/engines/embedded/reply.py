"""Replies in SGLang's form."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from slimecli.engines.embedded.request import Request
from slimecli.engines.embedded.text import TextCodec, first_stop


@dataclass(frozen=True)
class Ended:
    """A request that answers now."""

    request: Request
    said: list[int]
    log_probs: list[float]
    reason: dict[str, Any]


def replies(ended: list[Ended], codec: TextCodec, version: str) -> list[dict[str, Any]]:
    """One reply each; texts are decoded together."""
    texts: dict[int, str] = {}
    for skip in (True, False):
        chosen = [i for i, e in enumerate(ended) if e.request.sampling.skip_special_tokens is skip]
        decoded = codec.decode([_visible(ended[i]) for i in chosen], skip) if chosen else []
        texts.update(zip(chosen, decoded, strict=True))
    return [_reply(e, _trim(e, texts[i]), version) for i, e in enumerate(ended)]


def partial_reply(
    request: Request, said: list[int], log_probs: list[float], codec: TextCodec, version: str
) -> dict[str, Any]:
    """What a running request has so far; finish_reason is null."""
    text = codec.decode([said], request.sampling.skip_special_tokens)[0]
    return _reply(Ended(request, said, log_probs, {}), text, version)


def _visible(item: Ended) -> list[int]:
    """Tokens that show in the text: the end token does not, unless no_stop_trim."""
    trim = item.reason.get("type") == "stop" and not item.request.sampling.no_stop_trim
    return item.said[:-1] if trim and isinstance(item.reason.get("matched"), int) else item.said


def _trim(item: Ended, text: str) -> str:
    if isinstance(item.reason.get("matched"), str) and not item.request.sampling.no_stop_trim:
        found = first_stop(text, item.request.sampling.stop)
        return text[: found[0]] if found else text
    return text


def _reply(item: Ended, text: str, version: str) -> dict[str, Any]:
    request, count = item.request, len(item.said)
    ends = [start for _, start in request.spans[1:]] + [count]
    spans = [
        {"version": name, "start": start, "end": end}
        for (name, start), end in zip(request.spans, ends, strict=False)
        if end > start
    ]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": item.reason or None,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": count,
        "cached_tokens": request.cached,
        "num_retractions": request.retractions,
        "weight_version": spans[-1]["version"] if spans else version,
        "weight_versions": spans,
        "e2e_latency": time.monotonic() - request.arrived,
    }
    if request.return_logprob:
        meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(item.log_probs, item.said, strict=True)]
        meta["input_token_logprobs"] = request.input_logprobs or []
        if request.top_logprobs:
            meta["output_top_logprobs"] = request.top[:count]
            meta["input_top_logprobs"] = request.input_top
    return {"text": text, "output_ids": item.said, "meta_info": meta}
