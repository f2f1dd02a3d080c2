"""Prompts into the cache, each distinct one once.

The last token of a context is not prefilled: it goes through the decode step like every other token. So a prompt that
is copied gives the same bits as one that is computed, and sampling happens in one place.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from slimecli.engines.embedded.kv import ROWS, round_up
from slimecli.engines.embedded.request import Request
from slimecli.engines.embedded.slot_model import SlotModel

TOKENS_AT_ONCE = 8192
"""padded tokens of one forward pass; bounds its activations"""
Key = tuple[int, ...]


class Prefixes:
    """Which slot holds the cache of which prompt."""

    def __init__(self) -> None:
        self._slot: dict[Key, int] = {}
        self._key: dict[int, Key] = {}

    def find(self, key: Key) -> int | None:
        """A slot whose cache begins with this prompt."""
        return self._slot.get(key)

    def remember(self, key: Key, slot: int) -> None:
        """`slot` holds this prompt now."""
        self._slot[key], self._key[slot] = slot, key

    def forget(self, slots: list[int]) -> None:
        """These slots are given away."""
        for slot in slots:
            key = self._key.pop(slot, None)
            if key is not None:
                del self._slot[key]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """The caches were copied from source to target slots."""
        for source, target in zip(sources, targets, strict=True):
            key = self._key.pop(source, None)
            if key is not None:
                self.remember(key, target)

    def clear(self) -> None:
        """The caches are out of date."""
        self._slot.clear()
        self._key.clear()


def fill(model: SlotModel, prefixes: Prefixes, placed: list[tuple[int, Request]]) -> None:
    """Bring the context of every newly placed request, but its last token, into its slot."""
    compute: dict[int, list[tuple[int, Request, Key]]] = defaultdict(list)
    copy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for slot, request in placed:
        key = tuple(request.context[:-1])
        wants_logits = request.logprob_start >= 0 and request.input_logprobs is None
        if wants_logits and not key:
            _keep_input_logprobs(request, None)
        if not key:
            continue
        length = round_up(len(key), ROWS)
        source = prefixes.find(key)
        if source is None or wants_logits:
            compute[length].append((slot, request, key))
            if source is None:
                prefixes.remember(key, slot)
        else:
            copy[length].append((source, slot))
            request.cached = len(key)
    for length, work in compute.items():
        size = max(1, TOKENS_AT_ONCE // length)
        for start in range(0, len(work), size):
            _compute(model, work[start : start + size], length)
    for length, pairs in copy.items():
        model.cache.copy([s for s, _ in pairs], [t for _, t in pairs], length)


def _compute(model: SlotModel, work: list[tuple[int, Request, Key]], length: int) -> None:
    ids = torch.zeros(len(work), length, dtype=torch.int64)
    for row, (_, _, key) in enumerate(work):
        ids[row, : len(key)] = torch.tensor(key)
    slots = torch.tensor([slot for slot, _, _ in work], device=model.device)
    hidden = model.prefill(ids.to(model.device), slots)
    for row, (_, request, _) in enumerate(work):
        if request.logprob_start >= 0 and request.input_logprobs is None:
            _keep_input_logprobs(request, model.logits(hidden[row]))


def _keep_input_logprobs(request: Request, logits: torch.Tensor | None) -> None:
    """[[log-prob, id, None], ...] of the prompt from logprob_start on, untempered; nothing precedes the first token."""
    entries: list[list[Any]] = [[None, request.prompt[0], None]]
    tops: list[Any] = [None]
    count = len(request.prompt) - 1
    if logits is not None and count:
        log_probs = logits[:count].log_softmax(-1)
        ids = torch.tensor(request.prompt[1:], device=logits.device)
        values = log_probs.gather(-1, ids[:, None])[:, 0].tolist()
        entries += [[v, i, None] for v, i in zip(values, request.prompt[1:], strict=True)]
        if request.top_logprobs:
            best, names = log_probs.topk(request.top_logprobs, -1)
            rows = zip(best.tolist(), names.tolist(), strict=True)
            tops += [[[v, i, None] for v, i in zip(vs, ns, strict=True)] for vs, ns in rows]
    request.input_logprobs = entries[request.logprob_start :]
    request.input_top = tops[request.logprob_start :]
