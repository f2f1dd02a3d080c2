"""Answers that are told while they are said: events of one connection, and what several connections make together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import aiohttp
import orjson

from slimecli.engines.http_errors import EngineUnreachableError, refusal
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine, StreamingEngine

Reply = dict[str, Any]
Tell = Callable[[Reply], None]
"""takes the reply so far of one answer, with `index`"""


Stream = Callable[[Mapping[str, Any], Tell], Coroutine[Any, Any, None]]
"""an engine's generate_stream"""


def stream_of(engine: RolloutEngine) -> Stream:
    """How an engine is asked for answers that are told while they are said."""
    if not isinstance(engine, StreamingEngine):
        raise SlimeError(f"{type(engine).__name__} cannot stream answers", "set rollout.stream = false")
    return engine.generate_stream


async def events(content: aiohttp.StreamReader, url: str) -> AsyncIterator[Reply]:
    """Server-sent events of `/generate` up to [DONE]. An event that tells of an error raises."""
    buffer = b""
    async for data in content.iter_any():  # a reply so far may be longer than what reading by lines allows
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            text = line.strip().removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            if text:
                yield _event(text, url)
    raise EngineUnreachableError(
        f"the engine at {url} broke off in the middle of an answer", "see whether it still runs"
    )


def _event(text: bytes, url: str) -> Reply:
    try:
        item: Reply = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise SlimeError(f"the engine at {url} sent an event that is not JSON: {text[:200]!r}", "see its log") from None
    error = item.get("error")
    if error is None:
        return item
    told = error.get("message") if isinstance(error, dict) else error
    code = int(error.get("code") or 0) if isinstance(error, dict) else 0
    if 400 <= code < 500:
        raise refusal(url, "generating", str(told), code)
    raise EngineUnreachableError(f"the engine at {url} broke off: {told}", "see its log")


class Answers:
    """The answers to one payload, which may come from several engines: each goes on after the last token that was told.

    Args:
        payload: of `/generate`; `input_ids` and `sampling_params` have one entry per answer.
        tell: called with the reply so far, token ids and all, whenever it has grown.
    """

    def __init__(self, payload: Mapping[str, Any], tell: Tell) -> None:
        self._payload = dict(payload)
        self._tell = tell
        self._told: list[Reply | None] = [None] * len(payload["input_ids"])
        self._asked = 0
        """how often an engine was asked; what earlier ones still say is not listened to"""

    async def ask(self, stream: Stream) -> None:
        """Have an engine say what is missing. May be called again with another one when it raises."""
        self._asked += 1
        self._end_full()
        open_ones = self._open()
        if not open_ones:
            return
        await stream(self._rest(open_ones), self._taker(open_ones))
        if self._open():
            raise EngineUnreachableError("the engine ended its answers before their end", "see its log")

    def _open(self) -> list[int]:
        """Numbers of the answers that have not ended."""
        return [i for i, r in enumerate(self._told) if r is None or r["meta_info"]["finish_reason"] is None]

    def _end_full(self) -> None:
        """An answer whose last token was told, but not that it was the last."""
        for i in self._open():
            reply = self._told[i]
            if reply is not None and len(reply["output_ids"]) >= self._payload["sampling_params"][i]["max_new_tokens"]:
                reason = {"type": "length", "length": len(reply["output_ids"])}
                self._told[i] = reply = {**reply, "meta_info": {**reply["meta_info"], "finish_reason": reason}}
                self._tell(reply)

    def _rest(self, numbers: list[int]) -> dict[str, Any]:
        """The request for what is missing of these."""
        prompts, params = self._payload["input_ids"], self._payload["sampling_params"]
        said = [(self._told[i] or {}).get("output_ids", []) for i in numbers]
        return self._payload | {
            "input_ids": [[*prompts[i], *ids] for i, ids in zip(numbers, said, strict=True)],
            "sampling_params": [
                going_on(params[i] | {"max_new_tokens": params[i]["max_new_tokens"] - len(ids)}, len(ids))
                for i, ids in zip(numbers, said, strict=True)
            ],
        }

    def _taker(self, numbers: list[int]) -> Tell:
        """What the engine that is asked now calls."""
        asked, begun = self._asked, list(self._told)
        pieces: dict[int, Reply] = {}

        def take(item: Reply) -> None:
            if asked != self._asked:
                return
            try:
                number = numbers[item.get("index", 0)]
                if runs_ahead(item):
                    return
                pieces[number] = piece = grown(pieces.get(number), item)
            except (KeyError, IndexError, TypeError) as error:
                raise SlimeError(f"an engine streams what is no reply of /generate: {error!r}", "see its log") from None
            before = begun[number]
            reply = {**(piece if before is None else joined(before, piece)), "index": number}
            self._told[number] = reply
            self._tell(reply)

        return take


def going_on(params: Mapping[str, Any], said: int) -> dict[str, Any]:
    """Sampling parameters with which a seeded answer goes on after `said` tokens as if it had not been interrupted.

    SGLang's seeded choice depends on a token's place in the whole sequence; the embedded engine's on its number in the
    answer, which it reads from here.
    """
    if not said:
        return dict(params)
    custom = params.get("custom_params") or {}
    return {**params, "custom_params": {**custom, "said_before": custom.get("said_before", 0) + said}}


def runs_ahead(item: Reply) -> bool:
    """Whether an event before the last has tokens that it says nothing of yet; the next one has them too.

    SGLang (0.5.21, `TokenizerManager`) puts its own growing list into an event, beside counts and log-probabilities of
    the moment before, and what is said until the event is sent slips into it.
    """
    meta = item["meta_info"]
    return meta["finish_reason"] is None and len(item["output_ids"]) > int(meta["completion_tokens"])


def grown(before: Reply | None, item: Reply) -> Reply:
    """The reply so far, from what it was and an event that has either all of it or only what is new."""
    meta = dict(item["meta_info"])
    total = int(meta["completion_tokens"])
    old_ids = before["output_ids"] if before else []
    old_meta = before["meta_info"] if before else {}
    ids = _all(old_ids, list(item["output_ids"]), total)
    text = item["text"] if len(item["output_ids"]) == total or before is None else before["text"] + item["text"]
    if "output_token_logprobs" in meta:
        old = old_meta.get("output_token_logprobs", [])
        meta["output_token_logprobs"] = _all(old, list(meta["output_token_logprobs"]), total)
    if not meta.get("weight_versions"):  # not said by token: what is new comes from the weights that are there now
        new = {"version": meta.get("weight_version", ""), "start": len(old_ids), "end": total}
        meta["weight_versions"] = _spans(old_meta.get("weight_versions", []), [new])
    return {**item, "text": text, "output_ids": ids, "meta_info": meta}


def _all(old: list[Any], new: list[Any], total: int) -> list[Any]:
    if len(new) == total:
        return new
    if len(old) + len(new) == total:
        return [*old, *new]
    raise SlimeError(
        f"an engine streams {len(new)} tokens after {len(old)}, and says that it has {total}", "report its version"
    )


def joined(before: Reply, piece: Reply) -> Reply:
    """One reply of what was said before an engine was lost and what another one said after that."""
    count, meta, old = len(before["output_ids"]), piece["meta_info"], before["meta_info"]
    shifted = [{**s, "start": s["start"] + count, "end": s["end"] + count} for s in meta["weight_versions"]]
    return {
        **piece,
        "text": before["text"] + piece["text"],
        "output_ids": [*before["output_ids"], *piece["output_ids"]],
        "pieces": before.get("pieces", 1) + piece.get("pieces", 1),
        "meta_info": {
            **meta,
            "prompt_tokens": old.get("prompt_tokens", 0),
            "completion_tokens": count + len(piece["output_ids"]),
            "output_token_logprobs": [*old.get("output_token_logprobs", []), *meta.get("output_token_logprobs", [])],
            "weight_versions": _spans(old["weight_versions"], shifted),
        },
    }


def _spans(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One list of spans; neighbours of one version are one."""
    found = [dict(s) for s in old]
    for span in (s for s in new if s["end"] > s["start"]):
        if found and found[-1]["version"] == span["version"]:
            found[-1]["end"] = span["end"]
        else:
            found.append(dict(span))
    return found
