"""What an engine said, from SGLang's reply to one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Said:
    """One `/generate` reply."""

    ids: list[int]
    log_probs: list[float]
    versions: list[tuple[str, int, int]]
    """(weight version, start, end) in the order in which they spoke"""
    finish: str
    """finish_reason.type: stop, length or abort"""


def read_reply(reply: Mapping[str, Any] | Sequence[Any]) -> Said:
    """The reply to one request, or to a list of one."""
    one: Mapping[str, Any] = reply if isinstance(reply, Mapping) else reply[0]
    meta = one["meta_info"]
    triples = meta["output_token_logprobs"]
    whole = {"version": meta.get("weight_version", ""), "start": 0, "end": len(triples)}
    spans = [whole | span for span in meta.get("weight_versions") or [{}]]
    return Said(
        ids=[t[1] for t in triples],
        log_probs=[t[0] for t in triples],
        versions=[(str(span["version"]), span["start"], span["end"]) for span in spans],
        finish=meta["finish_reason"]["type"],
    )
