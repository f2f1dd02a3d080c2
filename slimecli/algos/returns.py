"""Returns and generalised advantages over packed samples, and the loss of a value model. Shapes: N samples, T tokens.

Only positions whose mask is 1 are steps: what a tool wrote inside an answer takes no time, and carries no value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns, 0 where mask is 0 (GAE: Schulman et al., arXiv 1506.02438, equation 16).

        delta_t = r_t + gamma V_{t+1} - V_t,  V = 0 after the last step
        A_t     = delta_t + gamma lam A_{t+1}
        returns = A + V

    Args:
        rewards: [T] given at each step.
        values: [T] of the state *before* each step.
        mask: [T] 1 where there is a step.
    """
    rows, steps, shape = _places(mask, cu_seqlens)
    r, v = (_padded(x, mask, rows, steps, shape) for x in (rewards, values))
    advantages = torch.zeros(shape, dtype=torch.float64)
    carry = torch.zeros(shape[0], dtype=torch.float64)
    following = torch.zeros(shape[0], dtype=torch.float64)
    for t in reversed(range(shape[1])):
        # behind a sample's last step all is zero, so that the recursion starts there by itself
        carry = r[:, t] + gamma * following - v[:, t] + gamma * lam * carry
        advantages[:, t], following = carry, v[:, t]
    found = torch.zeros_like(rewards)
    found[mask > 0] = advantages[rows, steps].to(rewards.dtype)
    return found, (found + values) * mask


def discounted_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """[T] sum over k >= 0 of gamma^k r_{t+k} over the steps from t on; 0 where mask is 0."""
    return gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, gamma, 1.0)[0]


def at_last_step(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [T]: the value of each sample at its last step, 0 elsewhere; a sample without steps is left out."""
    result = torch.zeros_like(mask)
    for sample, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        steps = mask[start:end].nonzero()
        if len(steps):
            result[start + int(steps[-1])] = values[sample]
    return result


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """[T] loss max((V - R)^2, (V' - R)^2) with V' = old + clamp(V - old, -clip, clip), and [T] 1 where V' is taken.

    There is no factor 1/2 (as in PPO's reference implementations there is): the critic's learning rate is its own.
    """
    plain = (values - returns).square()
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, clipped), (clipped > plain).float()


def _places(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Of each step: its sample, and its number within the sample; and the shape [N, most steps] that holds all."""
    count = torch.segment_reduce(mask.double(), "sum", offsets=cu_seqlens, initial=0).long()
    rows = torch.repeat_interleave(count)
    steps = torch.arange(len(rows)) - (count.cumsum(0) - count)[rows]
    return rows, steps, (len(count), int(count.max()) if len(count) else 0)


def _padded(values: Tensor, mask: Tensor, rows: Tensor, steps: Tensor, shape: tuple[int, int]) -> Tensor:
    padded = torch.zeros(shape, dtype=torch.float64)
    padded[rows, steps] = values[mask > 0].double()
    return padded
