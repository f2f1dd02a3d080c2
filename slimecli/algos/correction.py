"""Off-policy corrections: what the engine sampled, weighted and sifted for the policy that is trained.

The engine's probabilities mu differ from the trainer's: other kernels, other precision, older weights. With pi_old the
policy that the ratio of the loss refers to, per answer y of trained tokens t:

    token      rho_t = pi_old(y_t) / mu(y_t)
    sequence   rho   = prod_t rho_t
    geometric  rho   = (prod_t rho_t)^(1 / |y|)

The policy loss of a token (not its KL, not its entropy) is multiplied by w, without gradient:

    truncate   w = clamp(rho, low, high)
    mask       w = rho if low <= rho <= high, else 0
    rejection  w = 0 where rho, at reject_level, is outside reject_low .. reject_high
    veto       w = 0 for the whole answer if any rho_t < veto
    OPSM       w = 0 where A < 0 and mean_t log(mu(y_t) / pi(y_t)) > opsm_delta, pi being the policy of this moment

Denominators of the loss stay those of all tokens; `normalize` divides w by its mean over the optimizer step.

Names in use: TIS (Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training") is
token, truncate, high = 2; IcePop (Ring-1T, arXiv 2510.18855) is token, mask, 0.5 .. 5; MIS (Liu et al., 2025, "When
Speed Kills Stability") is sequence or geometric, mask; the decoupled objective with a proximal policy (Hilton et al.,
arXiv 2110.00641; AReaL, arXiv 2505.24298) is token, truncate, high = 0 (unbounded): pi_old is the trainer's at the
start of the step, whatever older weights the answer came from. OPSM is the off-policy sequence masking of
DeepSeek-V3.2 (arXiv 2512.02556), where the divergence is from what the engine returned, so that it holds for one
optimizer step per rollout too; slime measures it from its old log-probs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from slimecli.algos import LossInputs
from slimecli.algos.functions import per_sample_mean, per_sample_sum, per_token
from slimecli.batch import TrainBatch
from slimecli.errors import DataError
from slimecli.recipe_algo import AlgoSection, CorrectionSection

LARGEST_LOG_RATIO = 20.0
"""ratios are kept within exp(-20) .. exp(20), so that an unbounded one stays a number"""


def corrected(loss: Tensor, inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] policy loss with every correction of the recipe, and metrics: {} if there is none."""
    metrics: dict[str, Tensor] = {}
    engine = inputs.rollout_log_probs
    if not section.uses_engine_log_probs:
        return loss, metrics
    if engine is None:
        raise DataError(
            "the samples carry no rollout_log_probs, and algo.correction or algo.opsm_delta needs them",
            "let the generate function return them for every sample, or turn those off",
        )
    now = inputs.log_probs.detach()
    mask, bounds = inputs.loss_mask, inputs.cu_seqlens
    if section.correction.level != "none" or section.correction.reject_level != "none" or section.correction.veto:
        old = now if inputs.old_log_probs is None else inputs.old_log_probs
        weight, metrics = importance_weights((old - engine) * mask, mask, bounds, section.correction)
        loss = loss * weight
    if section.opsm_delta:
        away = per_token(per_sample_mean(engine - now, mask, bounds), bounds) > section.opsm_delta
        masked = away & (inputs.advantages < 0)
        loss = torch.where(masked, 0.0, loss)
        metrics["opsm_masked"] = masked.float()
    return loss, metrics


def normalised(batch: TrainBatch, section: AlgoSection) -> TrainBatch:
    """The samples of one optimizer step with advantages divided by the mean weight of their trained tokens, if asked.

    Every surrogate is proportional to a positive factor of its advantages, so this is what dividing the weights does;
    done here because a loss does not see the whole step. Where all weights are 0 there is nothing to divide.
    """
    if not section.correction.normalize:
        return batch
    if batch.old_log_probs is None or batch.rollout_log_probs is None or batch.advantages is None:
        raise DataError(
            "algo.correction.normalize needs advantages and both sides' log-probs, and the batch lacks one of them",
            "let the generate function return rollout_log_probs, or set algo.correction.normalize to false",
        )
    mask = batch.loss_mask
    log_ratio = (batch.old_log_probs - batch.rollout_log_probs) * mask
    weight, _ = importance_weights(log_ratio, mask, batch.cu_seqlens, section.correction)
    mean = float((weight * mask).double().sum() / mask.double().sum().clamp(min=1))
    return batch.replace(advantages=batch.advantages / mean) if mean else batch


def importance_weights(
    log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, section: CorrectionSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] weights of the policy loss, and metrics.

    Args:
        log_ratio: [T] log(pi_old / mu) of each token, 0 where mask is 0.
    """
    weight = torch.ones_like(log_ratio)
    metrics: dict[str, Tensor] = {}
    if section.level != "none":
        ratio = at_level(log_ratio, mask, cu_seqlens, section.level)
        outside = is_outside(ratio, section.low, section.high)
        if section.mode == "mask":
            weight = torch.where(outside, 0.0, ratio)
        else:
            weight = ratio.clamp(section.low, section.high or None)
        metrics["correction_outside"] = outside.float()
    kept = torch.ones_like(weight)
    if section.reject_level != "none":
        ratio = at_level(log_ratio, mask, cu_seqlens, section.reject_level)
        kept = (~is_outside(ratio, section.reject_low, section.reject_high)).float()
    if section.veto:
        bad = (torch.exp(log_ratio) < section.veto).to(mask.dtype) * mask
        kept = kept * (per_token(per_sample_sum(bad, cu_seqlens), cu_seqlens) == 0).float()
    if section.reject_level != "none" or section.veto:
        metrics["correction_rejected"] = 1 - kept
    weight = weight * kept
    metrics["correction_weight"] = weight
    return weight, metrics


def at_level(
    log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Literal["token", "sequence", "geometric"]
) -> Tensor:
    """[T] the ratio at a level, the same for all tokens of an answer unless it is the token's own."""
    if level == "sequence":
        log_ratio = per_token(per_sample_sum(log_ratio * mask, cu_seqlens), cu_seqlens)
    elif level == "geometric":
        log_ratio = per_token(per_sample_mean(log_ratio, mask, cu_seqlens), cu_seqlens)
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def is_outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] bool: below low, or above high unless that is 0."""
    outside = ratio < low
    return outside | (ratio > high) if high else outside
