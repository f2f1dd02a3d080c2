"""GRPO: group-relative policy optimisation.

Paper: DeepSeekMath (arXiv 2402.03300), equations 3 and 4, outcome supervision.

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)              mean and unbiased std over the group of answers to one prompt
    rho_t = exp(log pi(y_t) - log pi_old(y_t))
    l_t   = max(-rho_t A_i, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_i) + kl_coef KL_t - entropy_coef H_t

What differs from PPO (arXiv 1707.06347): no critic; the group mean is the baseline; the KL to the reference is a loss
term, not part of the reward. What is selectable here: `std_normalization = false` leaves out the std (Dr. GRPO, arXiv
2503.20783, which also takes `aggregation = "constant"`); `eps_clip_high` above `eps_clip` is DAPO's clip-higher (arXiv
2503.14476), which also takes `aggregation = "token"`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.algos._functions import clipped_surrogate, group_centred, kl_estimate, per_token
from slimecli.batch import TrainBatch
from slimecli.recipe_sections import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] the group-relative reward of the answer at each of its trained positions."""
    per_sample = group_centred(batch.rewards, batch.group_ids, by_std=section.std_normalization)
    return per_token(per_sample, batch.cu_seqlens) * batch.loss_mask


def loss(inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] loss and metrics."""
    old = inputs.log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    log_ratio = inputs.log_probs - old
    ratio = torch.exp(log_ratio)
    result, clipped = clipped_surrogate(ratio, inputs.advantages, section.eps_clip, section.eps_clip_high)
    metrics = {"ppo_kl": -log_ratio.detach(), "clip_fraction": clipped, "entropy": inputs.entropy.detach()}
    if section.entropy_coef > 0:
        result = result - section.entropy_coef * inputs.entropy
    if inputs.ref_log_probs is not None:
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, section.kl_type)
        metrics["kl"] = kl.detach()
        result = result + section.kl_coef * kl
    return result, metrics


GRPO = Algorithm(name="grpo", advantages=advantages, loss=loss)
