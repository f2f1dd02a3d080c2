"""What policy-gradient algorithms share: rewards, from answers to tokens, and the terms around the surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from slimecli.algos import LossInputs
from slimecli.algos.correction import corrected
from slimecli.algos.functions import (
    clipped_surrogate,
    dual_clipped,
    group_centred,
    kl_estimate,
    over_executions,
    per_sample_sum,
    per_token,
    whiten,
)
from slimecli.batch import TrainBatch
from slimecli.errors import SlimeError
from slimecli.recipe_algo import AlgoSection


def token_penalty(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] kl_coef x KL estimate of each trained token from the log-probs before the step, 0 unless it is in the reward.

    It is a part of the reward and has no gradient; the policy it speaks of is the old one.
    """
    if not section.kl_in_reward:
        return torch.zeros_like(batch.loss_mask)
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        raise SlimeError(
            "the KL in the reward needs old_log_probs and ref_log_probs, and the batch lacks one of them",
            "call Trainer.log_probs for both before algorithm.advantages",
        )
    return section.kl_coef * kl_estimate(batch.old_log_probs, batch.ref_log_probs, section.kl_type) * batch.loss_mask


def penalised_rewards(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[N] reward of each answer, minus the penalties of its execution's tokens."""
    penalties = per_sample_sum(token_penalty(batch, section), batch.cu_seqlens)
    return batch.rewards - over_executions(penalties, batch.rollout_ids)


def compared(rewards: Tensor, batch: TrainBatch, section: AlgoSection, *, by_std: bool) -> Tensor:
    """[N] rewards centred within their groups, unless the recipe says to leave them alone."""
    if not section.rewards_normalization:
        return rewards
    return group_centred(rewards, batch.group_ids, batch.rollout_ids, by_std=by_std)


def spread(per_sample: Tensor, batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[N] -> [T] the advantage of an answer at each of its trained positions, whitened if asked."""
    values = per_token(per_sample, batch.cu_seqlens) * batch.loss_mask
    return whiten(values, batch.loss_mask) if section.whiten_advantages else values


def log_ratio(inputs: LossInputs) -> Tensor:
    """[T] log pi - log pi_old, with gradient; exactly 0 where the old policy is the current one."""
    old = inputs.log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    return inputs.log_probs - old


def clipped_loss(log_ratio: Tensor, inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] clipped surrogate of a [T] log-ratio, with dual clip if asked, and metrics."""
    ratio = torch.exp(log_ratio)
    loss, clipped = clipped_surrogate(ratio, inputs.advantages, section.eps_clip, section.eps_clip_high)
    metrics = {"ppo_kl": -log_ratio.detach(), "clip_fraction": clipped}
    if section.dual_clip:
        loss, metrics["dual_clip_fraction"] = dual_clipped(loss, inputs.advantages, section.dual_clip)
    return loss, metrics


def completed(
    surrogate: Tensor, metrics: dict[str, Tensor], inputs: LossInputs, section: AlgoSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] the whole loss: the surrogate with off-policy corrections, the entropy bonus, the KL to the reference."""
    result, found = corrected(surrogate, inputs, section)
    metrics = {**metrics, **found, "entropy": inputs.entropy.detach()}
    if section.entropy_coef > 0:
        result = result - section.entropy_coef * inputs.entropy
    if inputs.ref_log_probs is not None:
        weight = torch.exp(log_ratio(inputs)) if section.kl_unbiased else None
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, section.kl_type, weight)
        metrics["kl"] = kl.detach()
        if section.kl_in_loss:
            result = result + section.kl_coef * kl
    return result, metrics


def ppo_loss(inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] loss and metrics of everything whose surrogate is PPO's, token by token."""
    return completed(*clipped_loss(log_ratio(inputs), inputs, section), inputs, section)
