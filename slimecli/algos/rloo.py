"""RLOO: REINFORCE leave-one-out.

Paper: Back to Basics (arXiv 2402.14740), after Kool et al., 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free".

    R_i = r_i - kl_coef sum_t KL_t                             the KL only with kl_place = "reward", as the paper has it
    A_i = R_i - (1 / (k - 1)) sum_{j != i} R_j                 over the group of k answers to one prompt

What differs from GRPO: the baseline leaves the answer itself out, so that it is independent of it and the estimate is
unbiased; no std. The loss is GRPO's: on-policy its gradient is REINFORCE's, and clipping makes further optimizer steps
safe. An answer that is alone in its group has no baseline, and advantage 0.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.functions import leave_one_out
from slimecli.algos.policy import penalised_rewards, ppo_loss, spread
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] reward minus the mean of the others', at each trained position of the answer."""
    return spread(leave_one_out(penalised_rewards(batch, section), batch.group_ids, batch.rollout_ids), batch, section)


RLOO = Algorithm(name="rloo", advantages=advantages, loss=ppo_loss)
