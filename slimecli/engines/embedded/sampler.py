"""From logits to tokens, with per-slot settings.

A token's log-probability is log_softmax(adjusted logits / temperature) over the whole vocabulary; "adjusted" means
after penalties, logit bias and min_new_tokens. top_k, top_p and min_p cut the choice but do not renormalise the
reported value (SGLang's semantics). At temperature 0 the token is the argmax and the value that of temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from slimecli.engines.embedded.request import Sampling

_GOLDEN = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685
"""SplitMix64's constants as signed integers"""


def uniforms(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[M] float64 in (0, 1): SplitMix64 of (seed, number of the token in its answer); no state, no neighbours."""
    z = _mix(seeds * _GOLDEN + 1) + counts * _GOLDEN
    return (_shift(_mix(z), 12).to(torch.float64) + 0.5) * 2.0**-52


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


class Sampler:
    """Settings of every slot as tensors, and the sampling step."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.device = device
        self._slots = slots
        self.settings: list[Sampling | None] = [None] * slots
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._before = torch.zeros(slots, dtype=torch.int64, device=device)
        """tokens of the answer that came with the prompt"""
        self._temperature = torch.ones(slots, device=device)
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self._cuts = torch.ones(slots, 3, device=device)
        """top_k (as float), top_p, min_p"""
        self._penalties = torch.zeros(slots, 3, device=device)
        """frequency, presence, repetition"""
        self._counts = torch.zeros(0, 0, device=device)
        """[slots, vocab] how often a slot has said a token; taken when the first penalty arrives"""
        self._any_greedy = self._all_greedy = self._any_hot = False
        self._cut_rows: list[int] = []
        self._penalty_rows: list[int] = []
        self._special_rows: list[int] = []

    def place(self, slots: list[int], settings: Sequence[Sampling], said: Sequence[Sequence[int]]) -> None:
        """Put requests into slots.

        Args:
            said: tokens each request has said already (after a retraction), for the penalties.
        """
        index = torch.tensor(slots, device=self.device)
        self.seeds[index] = torch.tensor([s.seed for s in settings], device=self.device)
        self._before[index] = torch.tensor([s.said_before for s in settings], device=self.device)
        self._temperature[index] = torch.tensor([s.temperature or 1.0 for s in settings], device=self.device)
        self._greedy[index] = torch.tensor([s.temperature == 0 for s in settings], device=self.device)
        cuts = [[s.top_k if s.top_k > 0 else self.vocab, s.top_p, s.min_p] for s in settings]
        self._cuts[index] = torch.tensor(cuts, dtype=torch.float32, device=self.device)
        for slot, setting, tokens in zip(slots, settings, said, strict=True):
            self.settings[slot] = setting
            if setting.penalised:
                self._place_penalties(slot, setting, tokens)

    def _place_penalties(self, slot: int, setting: Sampling, tokens: Sequence[int]) -> None:
        if not self._counts.numel():
            self._counts = torch.zeros(self._slots, self.vocab, device=self.device)
        numbers = [setting.frequency_penalty, setting.presence_penalty, setting.repetition_penalty]
        self._penalties[slot] = torch.tensor(numbers, device=self.device)
        self._counts[slot] = 0
        if tokens:
            ids = torch.tensor(list(tokens), device=self.device)
            self._counts[slot].index_add_(0, ids, torch.ones(len(ids), device=self.device))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Requests change their slots."""
        src, dst = torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
        each = (self.seeds, self._before, self._temperature, self._greedy, self._cuts, self._penalties, self._counts)
        for tensor in each:
            if tensor.numel():
                tensor[dst] = tensor[src]
        for source, target in zip(sources, targets, strict=True):
            self.settings[target], self.settings[source] = self.settings[source], None

    def release(self, slot: int) -> None:
        """The slot is empty."""
        self.settings[slot] = None

    def plan(self) -> None:
        """Note which rows need more than plain sampling; call after slots changed."""
        taken = [(i, s) for i, s in enumerate(self.settings) if s is not None]
        greedy = [s.temperature == 0 for _, s in taken]
        self._any_greedy, self._all_greedy = any(greedy), all(greedy)
        self._any_hot = any(s.temperature not in (0, 1) for _, s in taken)
        self._cut_rows = [i for i, s in taken if s.cuts and s.temperature > 0]
        self._penalty_rows = [i for i, s in taken if s.penalised]
        self._special_rows = [i for i, s in taken if s.logit_bias or s.min_new_tokens]

    def sample(
        self, logits: torch.Tensor, counts: torch.Tensor, said: Sequence[int] | np.ndarray[Any, Any]
    ) -> tuple[torch.Tensor, ...]:
        """One token per row.

        Args:
            logits: [M, vocab] float32, changed in place.
            counts: [slots] tokens said so far, on the device.
            said: the same on the host, read only where min_new_tokens matters.

        Returns:
            tokens [M] int64, their log-probabilities [M] float32, and the log-softmax's parts (scaled logits
            [M, vocab], log-sum-exp [M, 1]) for top_logprobs. Rows beyond the slots are meaningless.
        """
        self._adjust(logits, said)
        rows = len(logits)
        if self._any_hot:
            known = min(rows, self._slots)
            logits[:known] /= self._temperature[:known, None]
        if self._all_greedy:
            tokens, lse = logits.argmax(-1), logits.logsumexp(-1, keepdim=True)
        else:
            tokens, lse = self._draw(logits, counts)
            if self._any_greedy:
                known = min(rows, self._slots)
                tokens[:known] = torch.where(self._greedy[:known], logits[:known].argmax(-1), tokens[:known])
        log_probs = (logits.gather(-1, tokens[:, None]) - lse)[:, 0]
        return tokens, log_probs, logits, lse

    def _draw(self, logits: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse of the cumulative distribution at one uniform per row; also each row's log-sum-exp [M, 1]."""
        known = min(len(logits), self._slots)
        u = torch.full((len(logits), 1), 0.5, dtype=torch.float64, device=self.device)
        u[:known, 0] = uniforms(self.seeds[:known], self._before[:known] + counts[:known])
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:]
        point = (u * total).to(torch.float32)
        tokens = torch.searchsorted(cumulative, point).clamp_(max=self.vocab - 1)[:, 0]
        if self._cut_rows:
            index = torch.tensor(self._cut_rows, device=self.device)
            tokens[index] = self._draw_cut(weights[index] / total[index], u[index], self._cuts[index])
        return tokens, total.log().add_(top)

    @staticmethod
    def _draw_cut(probabilities: torch.Tensor, u: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
        """The same among the tokens that top_k, top_p and min_p leave; the likeliest always stays."""
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        before = ordered.cumsum(-1) - ordered
        keep = (rank < cuts[:, :1]) & (before < cuts[:, 1:2]) & (ordered >= cuts[:, 2:3] * ordered[:, :1])
        keep[:, 0] = True
        cumulative = (ordered * keep).cumsum(-1)
        point = (u * cumulative[:, -1:]).to(torch.float32)
        place = torch.searchsorted(cumulative, point).clamp_(max=ordered.shape[-1] - 1)
        return ids.gather(-1, place)[:, 0]

    def _adjust(self, logits: torch.Tensor, said: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Penalties over the tokens said so far, logit bias, and no end before min_new_tokens."""
        if self._penalty_rows:
            index = torch.tensor(self._penalty_rows, device=self.device)
            frequency, presence, repetition = self._penalties[index].unbind(-1)
            counts, x = self._counts[index], logits[index]
            seen = counts > 0
            x = x - frequency[:, None] * counts - presence[:, None] * seen
            factor = torch.where(seen, repetition[:, None], torch.ones_like(x))
            logits[index] = torch.where(x > 0, x / factor, x * factor)
        for row in self._special_rows:
            setting = self.settings[row]
            if setting is None:
                continue
            for token, bias in setting.logit_bias:
                logits[row, token] += bias
            if said[row] < setting.min_new_tokens:
                logits[row, list(setting.stop_ids)] = float("-inf")

    def record(self, tokens: torch.Tensor) -> None:
        """Count what was said, for the penalties."""
        if self._penalty_rows:
            index = torch.tensor(self._penalty_rows, device=self.device)
            self._counts[index, tokens[index]] += 1


def top_tokens(scaled: torch.Tensor, lse: torch.Tensor, rows: list[int], count: int) -> list[list[list[Any]]]:
    """Per row: [[log-prob, id, None], ...] of the `count` likeliest tokens."""
    values, ids = (scaled[rows] - lse[rows]).topk(min(count, scaled.shape[-1]), -1)
    return [
        [[v, i, None] for v, i in zip(vs, ns, strict=True)]
        for vs, ns in zip(values.tolist(), ids.tolist(), strict=True)
    ]
