"""Dr. GRPO: GRPO without its two biases.

Paper: Understanding R1-Zero-Like Training (arXiv 2503.20783).

    A_i = r_i - mean(r)                                        over the group of answers to one prompt
    loss = sum_i sum_t l_t / (constant_length x answers)       l_t as in GRPO

What differs from GRPO: the advantage is not divided by the group's std, which favours questions that are too easy or
too hard; and the sum over an answer's tokens is not divided by its length, which favours long wrong answers
(`aggregation = "constant"`, which this algorithm asks for). RLOO's advantage is this one times k / (k - 1) in a group
of k.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.policy import compared, penalised_rewards, ppo_loss, spread
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] reward minus the group's mean, at each trained position of the answer."""
    return spread(compared(penalised_rewards(batch, section), batch, section, by_std=False), batch, section)


DR_GRPO = Algorithm(name="dr_grpo", advantages=advantages, loss=ppo_loss)
