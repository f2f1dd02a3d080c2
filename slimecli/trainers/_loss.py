"""What every trainer makes of a micro-batch's log-probs: the algorithm's loss, weighted, and sums for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.algos.returns import clipped_value_loss
from slimecli.batch import TrainBatch
from slimecli.errors import SlimeError
from slimecli.recipe_algo import AlgoSection


@dataclass
class Tally:
    """Sums and maxima over the micro-batches of one optimizer step, on one rank."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """metric -> [] float64 sum over trained tokens"""
    largest: dict[str, Tensor] = field(default_factory=dict)
    """metric -> [] maximum over trained tokens"""

    def add(self, values: dict[str, Tensor], largest: dict[str, Tensor]) -> None:
        """Count a micro-batch in."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.double()
        for name, value in largest.items():
            self.largest[name] = torch.maximum(self.largest.get(name, value.new_zeros(())), value)


def weighted_loss(
    algorithm: Algorithm,
    algo: AlgoSection,
    batch: TrainBatch,
    log_probs: Tensor,
    entropy: Tensor,
    tally: Tally,
    *,
    counts: bool,
) -> Tensor:
    """[] loss of a micro-batch, to be added to those of all others; `tally` takes its metrics.

    Args:
        log_probs: [T] with gradient, 0 where not trained.
        entropy: [T] with gradient, 0 where not trained.
        counts: False for a micro-batch that only keeps collectives in step: its loss is 0.
    """
    inputs = loss_inputs(batch, log_probs, entropy)
    per_token, metrics = algorithm.loss(inputs, algo)
    loss = (per_token * batch.loss_weight.to(log_probs.device) * float(counts)).sum()
    largest: dict[str, Tensor] = {}
    if inputs.rollout_log_probs is not None:
        gap = (log_probs.detach() - inputs.rollout_log_probs).abs() * inputs.loss_mask
        metrics = {**metrics, "logprob_gap": gap}
        largest["logprob_gap_max"] = gap.max() * float(counts)
    masked = {name: (value * inputs.loss_mask).sum() * float(counts) for name, value in metrics.items()}
    tally.add({"loss": loss.detach(), **masked}, largest)
    return loss


def weighted_value_loss(values: Tensor, batch: TrainBatch, clip: float, tally: Tally, *, counts: bool) -> Tensor:
    """[] loss of a critic on a micro-batch, to be added to those of all others; `tally` takes its metrics.

    Args:
        values: [T] with gradient, 0 where not trained.
        clip: recipe's algo.value_clip.
        counts: False for a micro-batch that only keeps collectives in step.
    """
    if batch.values is None or batch.returns is None:
        raise SlimeError("the batch has no values or no returns", "set them before Trainer.step")
    old, returns, mask, weight = (
        x.to(values.device) for x in (batch.values, batch.returns, batch.loss_mask, batch.loss_weight)
    )
    loss, clipped = clipped_value_loss(values, old, returns, clip)
    metrics = {"value_loss": loss.detach(), "value_clip_fraction": clipped}
    tally.add({name: (x * mask).sum() * float(counts) for name, x in metrics.items()}, {})
    return (loss * weight * float(counts)).sum()


def loss_inputs(batch: TrainBatch, log_probs: Tensor, entropy: Tensor) -> LossInputs:
    """A micro-batch as its loss sees it, on the device of the log-probs."""

    def here(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(log_probs.device)

    if batch.advantages is None:
        raise SlimeError("the batch has no advantages", "call algorithm.advantages before Trainer.step")
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        old_log_probs=here(batch.old_log_probs),
        ref_log_probs=here(batch.ref_log_probs),
        rollout_log_probs=here(batch.rollout_log_probs),
        advantages=batch.advantages.to(log_probs.device),
        loss_mask=batch.loss_mask.to(log_probs.device),
        cu_seqlens=batch.cu_seqlens.to(log_probs.device),
    )
