"""The pure functions that algorithms are made of. Shapes: N samples, T packed tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]


def per_token(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [T]: the value of its sample at every position."""
    return torch.repeat_interleave(values, cu_seqlens.diff())


def per_sample_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [N]: the sum over each sample's positions, in their order whatever else is in the batch."""
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0)


def per_sample_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [N]: the mean over each sample's trained positions; 0 where there are none."""
    return per_sample_sum(values * mask, cu_seqlens) / per_sample_sum(mask, cu_seqlens).clamp(min=1)


def group_centred(
    rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None = None, *, by_std: bool, eps: float = 1e-6
) -> Tensor:
    """[N] reward minus the mean of its group, divided by (unbiased std + eps) if asked.

    Groups are told by id, never by position, and may differ in size. Mean and std are over executions: k samples cut
    from one count 1/k each; without rollout_ids every sample is one. A group without a difference in reward, or of one
    execution, gives exactly 0: rounding in its mean must not be blown up by a tiny std.
    """
    group, count, part, alike = _groups(rewards, group_ids, rollout_ids)
    x = rewards.double()
    centred = x - (_group_sums(x * part, group, len(count)) / count)[group]
    if by_std:
        variance = _group_sums(centred.square() * part, group, len(count)) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return torch.where(alike[group], 0.0, centred).float()


def leave_one_out(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None = None) -> Tensor:
    """[N] reward minus the mean of the *other* executions of its group; exactly 0 for equal rewards, and for one alone.

    The reward of an execution is the mean over the samples cut from it.
    """
    group, count, part, alike = _groups(rewards, group_ids, rollout_ids)
    x = rewards.double()
    own = x if rollout_ids is None else over_executions(x * part, rollout_ids)
    others = (_group_sums(x * part, group, len(count))[group] - own) / (count[group] - 1).clamp(min=1)
    return torch.where(alike[group], 0.0, x - others).float()


def over_executions(values: Tensor, rollout_ids: Tensor) -> Tensor:
    """[N] the sum over all samples of each sample's execution."""
    _, execution = torch.unique(rollout_ids, return_inverse=True)
    return torch.zeros_like(values).index_add(0, execution, values)[execution]


def _groups(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N] number of each sample's group; [groups] its executions; [N] share of a sample in its execution; [groups]
    whether there is nothing to compare: one execution, or rewards that are all the same."""
    groups, group = torch.unique(group_ids, return_inverse=True)
    rollout_ids = torch.arange(len(group)) if rollout_ids is None else rollout_ids
    _, execution, samples = torch.unique(rollout_ids, return_inverse=True, return_counts=True)
    part = 1.0 / samples[execution].double()
    pairs = torch.unique(torch.stack([group, execution]), dim=1)
    count = torch.bincount(pairs[0], minlength=len(groups))
    x = rewards.double()
    low = torch.full((len(count),), torch.inf, dtype=torch.float64).scatter_reduce(0, group, x, "amin")
    high = torch.full((len(count),), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, x, "amax")
    return group, count, part, (low == high) | (count == 1)


def _group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.float64).index_add(0, group, values)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T] (x - mean) / sqrt(variance + 1e-8) where mask is 1, over all of them together; 0 elsewhere.

    The variance is the unbiased one. Values that are all the same give exactly 0.
    """
    chosen = values[mask > 0].double()
    result = torch.zeros_like(values)
    if len(chosen) > 1 and chosen.min() != chosen.max():
        centred = chosen - chosen.mean()
        scale = torch.rsqrt(centred.square().sum() / (len(chosen) - 1) + 1e-8)
        result[mask > 0] = (centred * scale).to(values.dtype)
    return result


def kl_estimate(log_probs: Tensor, base: Tensor, kind: KlKind, weight: Tensor | None = None) -> Tensor:
    """[T] estimators of KL(policy || base) from samples of the policy (Schulman, 2020, http://joschu.net/blog/kl-approx).

    With d = log_probs - base:
        k1 = d                  unbiased; may be negative; as a loss its expected gradient is zero
        k2 = d^2 / 2            biased; as a loss its expected gradient is that of the KL
        k3 = exp(-d) - 1 + d    unbiased, never negative; as a loss its expected gradient is that of KL(base || policy)
        low_var_kl              k3 bounded to -10..10, so that one token cannot make the loss

    Args:
        weight: [T] policy ratio *with* gradient. Multiplied by it, k1 and k3 have the KL's expected gradient, and the
            KL of the present policy is estimated from samples of an older one (DeepSeek-V3.2, arXiv 2512.02556).
    """
    d = log_probs - base
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d.square() / 2
    else:
        kl = torch.expm1(-d) + d
    if weight is not None:
        kl = weight * kl
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[T] PPO loss max(-r A, -clip(r, 1 - low, 1 + high) A), and [T] 1 where the clipped side is the one taken."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(plain, clipped), (clipped > plain).float()


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """[T] loss, at most -bound x A where A < 0 (Ye et al., arXiv 1912.09729), and [T] 1 where that took effect."""
    most = -bound * advantages
    beyond = (advantages < 0) & (loss > most)
    return torch.where(beyond, most, loss), beyond.float()
