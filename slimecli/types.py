"""The data that is written to disk and passed between stages: plain Python, no torch.

Suffixes for ragged data: `_P` prompts, `_G` samples of a group, `_T` tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from slimecli.errors import DataError

Message = dict[str, Any]
LAST_TURN = "last_turn"
"""key of metadata with what the model said last, in a response of several turns; built-in scorers look at that alone"""


class SampleStatus(StrEnum):
    """How an answer ended."""

    PENDING = "pending"
    """not generated yet"""
    COMPLETED = "completed"
    """the model ended its answer (end token or stop string)"""
    TRUNCATED = "truncated"
    """the token budget ended it"""
    ABORTED = "aborted"
    """generation was stopped from outside; it can be continued"""
    FAILED = "failed"
    """the engine or the reward function failed; never trained on"""


@dataclass(kw_only=True)
class Sample:
    """One prompt and one answer to it, token by token. Token ids are the truth; text is derived from them.

    Example: prompt ids [7, 8], answer ids [9, 10, 2] where id 10 came from a tool and is not trained on:
        tokens=[7, 8, 9, 10, 2], response_length=3, loss_mask=[1, 0, 1], rollout_log_probs=[-0.1, 0.0, -0.3]
    """

    group_index: int | None = None
    """running number of the prompt over the whole run; samples of one group share it"""
    index: int | None = None
    """running number of the sample over the whole run"""
    rollout_id: int | None = None
    """execution id: several samples cut from one agent execution share it; None means its own"""
    prompt: str | list[Message] = ""
    """rendered prompt text, or chat messages for SFT"""
    tokens: list[int] = field(default_factory=list)
    """[prompt + response] token ids"""
    response: str = ""
    """text of the response tokens"""
    response_length: int = 0
    """number of response tokens: everything after the first prompt, tool output included"""
    label: str | None = None
    """what the reward function compares with"""
    reward: float | dict[str, float] | None = None
    """score, or named scores of which `reward.key` picks one"""
    loss_mask: list[int] | None = None
    """[response_length] 1 where the token is trained on; None means all ones"""
    rollout_log_probs: list[float] | None = None
    """[response_length] log-probability the engine gave each token as sampled; 0.0 where not trained on"""
    weight_versions: list[str] = field(default_factory=list)
    """weight versions that spoke this answer, in order of first use"""
    version_spans: list[list[Any]] = field(default_factory=list)
    """[[version, start, end], ...]: who spoke response tokens start..end-1; tokens in no span came from elsewhere"""
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    """free data of the row: tools, rm_type, source_name, ..."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """effective sampling parameters, as sent to the engine"""
    remove_sample: bool = False
    """True zeroes the loss mask; the reward still counts in its group"""
    teacher_log_probs: list[float] | None = None
    """[response_length] log-probability under a teacher (on-policy distillation)"""
    session_id: str | None = None
    """routing key: requests of one conversation go to one engine"""
    train_metadata: dict[str, Any] | None = None
    """shipped to the trainer with the sample"""
    non_generation_time: float = 0.0
    """seconds spent in tools and environments; not a part of the JSON form, which is the same in every equal run"""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def mask(self) -> list[int]:
        """[response_length] the loss mask with None and remove_sample resolved."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return sum(self.mask)

    def get_reward_value(self, key: str | None = None) -> float:
        """The score as one number; `key` picks from named scores, without one the score named `score`."""
        if self.reward is None:
            raise DataError(f"sample {self.index} has no reward", "give every sample a reward before it is used")
        if isinstance(self.reward, dict):
            name = key or "score"
            if name not in self.reward:
                raise DataError(
                    f"sample {self.index} has rewards {sorted(self.reward)} but reward.key is {key!r}",
                    "set reward.key to one of these names",
                )
            return float(self.reward[name])
        return float(self.reward)

    def check(self, *, scored: bool = True) -> None:
        """Raise DataError unless the lengths agree and a finished sample is complete.

        Args:
            scored: a finished sample needs a reward.
        """
        problems = []
        if not 0 <= self.response_length <= len(self.tokens):
            problems.append(f"response_length {self.response_length} outside 0..{len(self.tokens)}")
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                problems.append(f"{name} has {len(value)} entries for {self.response_length} response tokens")
        if self.rollout_log_probs and any(x != x or x > 1e-4 for x in self.rollout_log_probs):
            problems.append("rollout_log_probs holds NaN or a positive value")
        if scored and self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) and self.reward is None:
            problems.append("finished without a reward")
        if problems:
            raise DataError(f"sample {self.index}: " + "; ".join(problems), "mend the generate or reward function")

    def _stated(self) -> dict[str, Any]:
        """Fields that are not empty and not wall time; values are shared with the sample."""
        values = {name: getattr(self, name) for name in _FIELDS - {"non_generation_time"}}
        out = {k: v for k, v in values.items() if v or (v is not None and not isinstance(v, (list, dict, str)))}
        out["status"] = self.status.value
        return out

    def to_json(self) -> str:
        """One line of JSON, keys sorted; empty fields are left out."""
        return json.dumps(self._stated(), sort_keys=True, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict that shares nothing with the sample; empty fields are left out."""
        out: dict[str, Any] = json.loads(self.to_json())
        return out

    def copies(self, n: int) -> list[Sample]:
        """Samples equal to this one that share nothing. Through JSON text, which the C library copies fastest."""
        text = self.to_json()
        return [Sample.from_dict(json.loads(text)) for _ in range(n)]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of to_dict; an unknown key is an error, never an attribute."""
        unknown = data.keys() - _FIELDS
        if unknown:
            raise DataError(f"unknown sample field(s) {sorted(unknown)}", "keep own data under `metadata`")
        return cls(**{**data, "status": SampleStatus(data.get("status", "pending"))})


_FIELDS = frozenset(f.name for f in fields(Sample))


Group = list[Sample]
"""All samples of one prompt."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one optimizer step reports. All values are global: independent of micro-batches and ranks."""

    loss: float
    """the minimised value"""
    grad_norm: float
    """L2 norm of the gradient before clipping"""
    lr: float
    """learning rate used"""
    tokens: int
    """tokens that carry loss weight"""
    metrics: dict[str, float] = field(default_factory=dict)
    """means over trained tokens: entropy, kl, clip_fraction, ppo_kl, ..."""


@dataclass(frozen=True, kw_only=True)
class WeightReceipt:
    """What an engine answers to a weight update; the loop compares it with the trainer's own values."""

    version: int
    """step whose weights the engine now holds"""
    fingerprint: str
    """slimecli.weights.fingerprint over the engine's own live tensors, taken after the update; empty: it cannot say"""
    seconds: float
    bytes_: int
    """read by the engine"""
    pause_seconds: float = 0.0
    """how long the engine generated nothing for it, waiting for running answers included"""
    how: str = "full"
    """full: all weights; changes: those of the last version; full+changes: it had to catch up; none: it held them"""
