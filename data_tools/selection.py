"""What of finished samples is written: as `samples` or `sft`, all of a group or the ones that a rule picks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimecli.errors import UsageError, nearest
from slimecli.types import Group, Sample, SampleStatus

FORMS = ("samples", "sft")
PASSING = 1.0
"""score from which an answer counts as correct"""
PROMPT_MESSAGES = "prompt_messages"
"""key of metadata under which offline samples carry their prompt as chat messages"""
ANSWER_MESSAGES = "answer_messages"
"""key of metadata under which an offline sample of several turns carries them as chat messages"""

_Pick = Callable[[Group, list[float]], list[Sample]]


@dataclass(frozen=True)
class Selection:
    """`FORM[:RULE]` of the command line, taken apart."""

    form: str
    rule: str
    value: float
    """of `min=X`: the least reward; of `best=K`: how many"""

    def pick(self, group: Group, reward_key: str | None, left: Counter[str]) -> list[Sample]:
        """The samples of one prompt that are written, in their order.

        Args:
            left: receives why the others are not.
        """
        usable = []
        for sample in group:
            reason = self._unusable(sample)
            if reason:
                left[reason] += 1
            else:
                usable.append(sample)
        if self.rule == "all":
            return usable
        scored = [(sample.get_reward_value(reward_key), sample) for sample in usable if sample.reward is not None]
        if self.rule == "best":
            ranked = sorted(range(len(scored)), key=lambda i: (-scored[i][0], i))[: int(self.value)]
            chosen = [scored[i][1] for i in sorted(ranked)]
        else:
            chosen = [sample for score, sample in scored if score >= self.value]
        left[f"not {self.rule}"] += len(usable) - len(chosen)
        return chosen

    def _unusable(self, sample: Sample) -> str:
        """Why a sample cannot be written in this form; those that failed are only ever samples, and never picked."""
        if self.form == "samples" and self.rule == "all":
            return ""
        if sample.status is SampleStatus.FAILED or sample.status is SampleStatus.ABORTED:
            return "failed"
        if self.form == "sft" and sample.status is SampleStatus.TRUNCATED:
            return "truncated"
        if self.form == "sft" and PROMPT_MESSAGES not in sample.metadata:
            return "without prompt_messages"
        if self.form == "sft" and sample.metadata.get("segment", 0) != sample.metadata.get("segments", 1) - 1:
            return "an earlier segment"
        if self.form == "sft" and 0 in sample.mask and ANSWER_MESSAGES not in sample.metadata:
            return "several turns"
        return ""

    def line(self, sample: Sample, tool_key: str = "tools") -> str:
        """One line of JSON."""
        if self.form == "samples":
            return sample.to_json()
        return json.dumps(sft_row(sample, tool_key), sort_keys=True, ensure_ascii=False)


def parse_selection(text: str) -> Selection:
    """`samples`, `sft`, each with `:best`, `:best=K`, `:passing` or `:min=X`."""
    form, _, rule = text.partition(":")
    name, _, number = (rule or "all").partition("=")
    if form not in FORMS:
        raise UsageError(f"--as {text!r}: no form {form!r}{nearest(form, list(FORMS))}", _FIX)
    try:
        if name == "best" and (not number or int(number) > 0):
            return Selection(form, name, float(int(number or 1)))
        if name == "min" and math.isfinite(float(number)):
            return Selection(form, name, float(number))
    except ValueError:
        raise UsageError(f"--as {text!r}: {number!r} is no number", _FIX) from None
    if name not in ("all", "passing") or number:
        raise UsageError(f"--as {text!r}: no rule {rule!r}{nearest(name, ['all', 'best', 'passing', 'min'])}", _FIX)
    return Selection(form, name, PASSING)


_FIX = "write samples or sft, alone or with a rule: sft:best, sft:best=2, sft:passing, samples:min=0.5"


def sft_row(sample: Sample, tool_key: str = "tools") -> dict[str, Any]:
    """A conversation for SFT: the prompt's messages and the answer, the reward beside them."""
    metadata = {k: v for k, v in sample.metadata.items() if k not in (PROMPT_MESSAGES, ANSWER_MESSAGES, "tools")}
    answers = sample.metadata.get(ANSWER_MESSAGES) or [{"role": "assistant", "content": sample.response}]
    row: dict[str, Any] = {
        "messages": [*sample.metadata[PROMPT_MESSAGES], *answers],
        "metadata": {**metadata, "reward": sample.reward, "group_index": sample.group_index},
    }
    if sample.metadata.get("tools"):
        row[tool_key] = sample.metadata["tools"]
    return row
