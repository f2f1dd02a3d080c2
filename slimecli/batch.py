"""TrainBatch: samples as packed tensors, with explicit and global loss denominators. Torch starts here.

Suffixes of shapes: N samples, T tokens of all samples together. Nothing is padded; sample i owns the positions
cu_seqlens[i] .. cu_seqlens[i + 1] - 1. Position t predicts tokens[t + 1], so masks, weights and log-probs stand at the
position *before* the token they speak of.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from slimecli.errors import DataError, UsageError
from slimecli.types import Group, Sample, SampleStatus

NEVER_TRAINED = (SampleStatus.FAILED, SampleStatus.ABORTED)


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Everything the loss needs.

    Example: one sample, prompt ids [7, 8], answer ids [9, 2]:
        tokens=[7, 8, 9, 2], targets=[8, 9, 2, 0], loss_mask=[0, 1, 1, 0], cu_seqlens=[0, 4], prompt_lengths=[2]
    """

    tokens: Tensor
    """[T] int64, samples one after the other"""
    cu_seqlens: Tensor
    """[N+1] int64, where each sample starts; the last entry is T"""
    targets: Tensor
    """[T] int64, tokens shifted by one inside each sample; 0 at its last position, which is never trained"""
    loss_mask: Tensor
    """[T] float32, 1 where the target is a trained response token"""
    loss_weight: Tensor
    """[T] float32; loss = sum_t loss_weight[t] * per-token loss[t]. The denominators are those of the whole optimizer
    step, so that micro-batches and ranks are simply added up"""
    rollout_log_probs: Tensor | None = None
    """[T] float32, what the engine said of each target, 0 where not trained"""
    old_log_probs: Tensor | None = None
    """[T] float32, of the policy that the ratio refers to; None: the current one (exactly on-policy)"""
    ref_log_probs: Tensor | None = None
    """[T] float32, of the reference model"""
    teacher_log_probs: Tensor | None = None
    """[T] float32, of the teacher that is distilled from"""
    advantages: Tensor | None = None
    """[T] float32"""
    values: Tensor | None = None
    """[T] float32, of the critic before the step, at the state before each target"""
    returns: Tensor | None = None
    """[T] float32, what the critic learns"""
    rewards: Tensor
    """[N] float32"""
    group_ids: Tensor
    """[N] int64, equal for the answers to one prompt"""
    rollout_ids: Tensor
    """[N] int64, equal for the samples cut from one agent execution"""
    prompt_lengths: Tensor
    """[N] int64"""
    temperature: float
    """sampling temperature; logits are divided by it"""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.rewards)

    @property
    def num_tokens(self) -> int:
        """T, prompts included."""
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """[N] int64 tokens per sample."""
        return self.cu_seqlens.diff()

    def replace(self, **changes: Any) -> TrainBatch:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def positions(self, indices: Sequence[int]) -> Tensor:
        """[T'] where the tokens of some samples stand, in the order given."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        cu_seqlens = _cumulative(lengths)
        shift = torch.repeat_interleave(self.cu_seqlens[:-1][rows] - cu_seqlens[:-1], lengths)
        return torch.arange(int(cu_seqlens[-1])) + shift

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The batch of some samples, in the order given. Loss weights keep the denominators of the whole."""
        if list(indices) == list(range(len(self.cu_seqlens) - 1)):
            return self
        rows = torch.as_tensor(indices, dtype=torch.int64)
        positions = self.positions(indices)
        changes: dict[str, Any] = {"cu_seqlens": _cumulative(self.lengths[rows])}
        for name in _PER_TOKEN:
            value = getattr(self, name)
            changes[name] = None if value is None else value[positions]
        for name in _PER_SAMPLE:
            changes[name] = getattr(self, name)[rows]
        return replace(self, **changes)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Plain arrays for Ray's object store; fields that are None are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays: dict[str, np.ndarray] = {k: v.cpu().numpy() for k, v in values.items() if isinstance(v, Tensor)}
        return {**arrays, "temperature": np.array(self.temperature)}

    @classmethod
    def from_numpy(cls, arrays: Mapping[str, np.ndarray]) -> TrainBatch:
        """Inverse of to_numpy. Copies: the object store hands out read-only memory."""
        tensors = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items() if k != "temperature"}
        return cls(**tensors, temperature=float(arrays["temperature"]))


_PER_TOKEN = (
    "tokens",
    "targets",
    "loss_mask",
    "loss_weight",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "advantages",
    "values",
    "returns",
)
_PER_SAMPLE = ("rewards", "group_ids", "rollout_ids", "prompt_lengths")


def from_groups(groups: list[Group], *, temperature: float, reward_key: str = "") -> TrainBatch:
    """Checked samples as one batch; failed and aborted ones are left out.

    Args:
        groups: samples of each prompt. A sample without group_index or rollout_id gets a (negative) one of its own.
        temperature: what the answers were sampled at.
        reward_key: which of several named scores is the reward.

    loss_weight is zero until `weigh` has been called.
    """
    if temperature <= 0:
        raise UsageError(
            f"log-probs at temperature {temperature:g} do not exist", "set rollout.temperature above 0 for training"
        )
    kept = [(g, s) for g, group in enumerate(groups) for s in group if s.status not in NEVER_TRAINED]
    if not kept:
        raise DataError("there is no sample to train on", "see why every answer failed in the rollout's samples")
    samples = [_checked(s) for _, s in kept]
    group_ids = [-1 - g if s.group_index is None else s.group_index for g, s in kept]
    rollout_ids = [-1 - i if s.rollout_id is None else s.rollout_id for i, s in enumerate(samples)]
    _check_executions(group_ids, rollout_ids)
    cu_seqlens = _cumulative(torch.tensor([len(s.tokens) for s in samples]))
    return TrainBatch(
        tokens=_packed([s.tokens for s in samples], torch.int64),
        cu_seqlens=cu_seqlens,
        targets=_packed([[*s.tokens[1:], 0] for s in samples], torch.int64),
        loss_mask=_packed([_shifted(s, s.mask) for s in samples], torch.float32),
        loss_weight=torch.zeros(int(cu_seqlens[-1])),
        rollout_log_probs=_log_probs(samples, "rollout_log_probs"),
        teacher_log_probs=_log_probs(samples, "teacher_log_probs"),
        rewards=torch.tensor([0.0 if s.reward is None else s.get_reward_value(reward_key or None) for s in samples]),
        group_ids=torch.tensor(group_ids),
        rollout_ids=torch.tensor(rollout_ids),
        prompt_lengths=torch.tensor([s.prompt_length for s in samples]),
        temperature=temperature,
    )


def weigh(
    batch: TrainBatch, aggregation: Literal["sample", "token", "constant"], constant_length: int = 0
) -> TrainBatch:
    """Set loss_weight; call it on the samples of one whole optimizer step.

    With m the loss mask and E the number of executions (distinct rollout ids), the weight of a token is
        sample:    m / (D * E), D = trained tokens of all samples of its execution
        token:     m / (trained tokens of the step)
        constant:  m / (constant_length * E)
    """
    if aggregation == "constant" and constant_length <= 0:
        raise UsageError(
            f"algo.constant_length is {constant_length}", "set it to a number of tokens, e.g. the answer budget"
        )
    mask = batch.loss_mask.double()
    ids, execution = torch.unique(batch.rollout_ids, return_inverse=True)
    if aggregation == "token":
        weight = mask / mask.sum().clamp(min=1)
    elif aggregation == "constant":
        weight = mask / (constant_length * len(ids))
    else:
        of_token = torch.repeat_interleave(execution, batch.lengths)
        trained = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, of_token, mask)
        weight = mask / (trained.clamp(min=1)[of_token] * len(ids))
    return batch.replace(loss_weight=weight.float())


def split_steps(batch: TrainBatch, steps: int) -> list[TrainBatch]:
    """Mini-batches of the optimizer steps: whole executions, in order, in equal numbers.

    An answer that failed must not stop a run, so sizes may differ by one execution; the first steps get the more.
    """
    order = list(dict.fromkeys(batch.rollout_ids.tolist()))
    if len(order) < steps:
        raise DataError(
            f"{len(order)} answers cannot be split over {steps} optimizer steps",
            "lower trainer.steps_per_rollout, or see why so few answers are left",
        )
    if steps == 1:
        return [batch]
    step_of = {rollout: i * steps // len(order) for i, rollout in enumerate(order)}
    wanted = [step_of[r] for r in batch.rollout_ids.tolist()]
    return [batch.select([i for i, step in enumerate(wanted) if step == k]) for k in range(steps)]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch.

    Samples stay in order inside contiguous bins (group members stay together), bins are as level as that allows, every
    rank gets the same number of them, and bins that run at the same time are of like size. A sample above the budget is
    alone in its bin. A bin is empty only where there are fewer samples than bins.

    Example: plan_micro_batches([5, 5, 4, 6], max_tokens=10, ranks=2) -> [[[0, 1]], [[2, 3]]]
    """
    filled = _fill(lengths, max_tokens)
    if ranks == len(filled) == 1:
        return [filled]
    count = -(-len(filled) // ranks) * ranks
    low, high = max(lengths), max(max_tokens, *lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(lengths, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bins = _fill(lengths, low)
    while len(bins) < count:
        widest = max(range(len(bins)), key=lambda i: (len(bins[i]) > 1, sum(lengths[j] for j in bins[i]), -i))
        half = (len(bins[widest]) + 1) // 2
        bins[widest : widest + 1] = [bins[widest][:half], bins[widest][half:]]
    if ranks == 1:
        return [bins]
    by_size = sorted(range(count), key=lambda i: (-sum(lengths[j] for j in bins[i]), i))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        row = by_size[start : start + ranks]
        turn = row if start // ranks % 2 == 0 else row[::-1]
        for rank, index in enumerate(turn):
            plan[rank].append(bins[index])
    return plan


def _fill(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Contiguous bins of at most `cap` tokens, each filled before the next is opened."""
    bins: list[list[int]] = []
    room = -1
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = cap
        bins[-1].append(index)
        room -= length
    return bins


def _checked(sample: Sample) -> Sample:
    sample.check()
    if sample.prompt_length < 1:
        raise DataError(
            f"sample {sample.index} has no prompt token: nothing predicts the first token of its answer",
            "begin the prompt with a start token",
        )
    return sample


def _check_executions(group_ids: list[int], rollout_ids: list[int]) -> None:
    """An execution works on one prompt: one that stood in two groups would halve the weight of both in the loss."""
    group_of: dict[int, int] = {}
    for group, rollout in zip(group_ids, rollout_ids, strict=True):
        if group_of.setdefault(rollout, group) != group:
            raise DataError(
                f"rollout_id {rollout} stands in the groups {group_of[rollout]} and {group}",
                "let the generate function leave rollout_id alone, or set it to the sample's index",
            )


def _log_probs(samples: list[Sample], name: Literal["rollout_log_probs", "teacher_log_probs"]) -> Tensor | None:
    """[T] what samples carry of each trained token, 0 elsewhere; None where none of them carries any."""
    stated = [getattr(s, name) for s in samples]
    if all(values is None for values in stated):
        return None
    for sample, values in zip(samples, stated, strict=True):
        if values is None:
            raise DataError(
                f"sample {sample.index} has no {name}, others of the step have",
                "let the generate function return log-probs for every sample, or for none",
            )
    rows = [
        _shifted(s, [x if m else 0.0 for x, m in zip(values, s.mask, strict=True)])
        for s, values in zip(samples, stated, strict=True)
    ]
    return _packed(rows, torch.float32)


def _shifted(sample: Sample, values: Sequence[float]) -> list[float]:
    """[tokens] per-response-token values moved to the positions that predict them."""
    return [0.0] * (sample.prompt_length - 1) + list(values) + [0.0]


def _packed(rows: list[Any], dtype: torch.dtype) -> Tensor:
    return flat_tensor(chain.from_iterable(rows), dtype)


def flat_tensor(values: Iterable[float], dtype: torch.dtype) -> Tensor:
    """Numbers as an int64 or float32 tensor. By way of an array: torch looks at every element of a list many times."""
    numbers = array("q" if dtype == torch.int64 else "f", values)
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
