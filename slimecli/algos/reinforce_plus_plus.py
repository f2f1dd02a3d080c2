"""REINFORCE++: REINFORCE with the KL in each token's reward and advantages whitened over the batch.

Paper: REINFORCE++ (arXiv 2501.03262).

    r_t = -kl_coef KL_t, + r_i at the last trained token       the KL only with kl_place = "reward", as the paper has it
    G_t = sum_{k >= 0} gamma^k r_{t+k}
    A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)                mean and unbiased variance over all trained tokens

What differs from GRPO: answers to one prompt are not compared (one answer per prompt will do); the baseline is the mean
of the whole rollout, and credit differs between tokens. The loss is GRPO's. Whitening is part of the algorithm and not
a switch. Tokens that are not trained (a tool's output) take no time: they do not discount what follows, while in
slime they do.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.functions import whiten
from slimecli.algos.policy import ppo_loss, token_penalty
from slimecli.algos.returns import at_last_step, discounted_returns
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] whitened returns."""
    mask, bounds = batch.loss_mask, batch.cu_seqlens
    rewards = at_last_step(batch.rewards, mask, bounds) - token_penalty(batch, section)
    return whiten(discounted_returns(rewards, mask, bounds, section.gamma), mask)


REINFORCE_PLUS_PLUS = Algorithm(name="reinforce_plus_plus", advantages=advantages, loss=ppo_loss)
