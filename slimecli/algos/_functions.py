"""The pure functions that algorithms are made of. Shapes: N samples, T packed tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def per_token(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [T]: the value of its sample at every position."""
    return torch.repeat_interleave(values, cu_seqlens.diff())


def group_centred(rewards: Tensor, group_ids: Tensor, *, by_std: bool, eps: float = 1e-6) -> Tensor:
    """[N] reward minus the mean of its group, divided by (unbiased std + eps) if asked.

    Groups are told by id, never by position, and may differ in size. A group without a difference in reward, or of one
    answer, gives exactly 0: rounding in its mean must not be blown up by a tiny std.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1
    x = rewards.double()
    zeros = torch.zeros(groups, dtype=torch.float64)
    count = zeros.index_add(0, group, torch.ones_like(x))
    centred = x - (zeros.index_add(0, group, x) / count)[group]
    low = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, group, x, "amin")
    high = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, x, "amax")
    if by_std:
        variance = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return torch.where((low == high)[group], 0.0, centred).float()


def kl_estimate(log_probs: Tensor, base: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """[T] estimators of KL(policy || base) from samples of the policy (Schulman, 2020, http://joschu.net/blog/kl-approx).

    With d = log_probs - base:
        k1 = d                  unbiased; may be negative; as a loss its expected gradient is zero
        k2 = d^2 / 2            biased; as a loss its expected gradient is that of the KL
        k3 = exp(-d) - 1 + d    unbiased, never negative; as a loss its expected gradient is that of KL(base || policy)
    """
    d = log_probs - base
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[T] PPO loss max(-r A, -clip(r, 1 - low, 1 + high) A), and [T] 1 where the clipped side is the one taken."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(plain, clipped), (clipped > plain).float()
