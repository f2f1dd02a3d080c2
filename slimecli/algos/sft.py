"""SFT: maximum likelihood of given answers.

    l_t = -log pi(y_t)

What differs from the policy losses: no reward, no ratio, no clipping; logits are taken at temperature 1, whatever the
rollout's is, because nothing was sampled.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] ones: every demonstration counts alike."""
    return batch.loss_mask.clone()


def loss(inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] negative log-likelihood and metrics."""
    return -inputs.log_probs, {"entropy": inputs.entropy.detach()}


SFT = Algorithm(name="sft", advantages=advantages, loss=loss, needs_rollout=False)
