"""GRPO: group-relative policy optimisation.

Paper: DeepSeekMath (arXiv 2402.03300), equations 3 and 4, outcome supervision.

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)              mean and unbiased std over the group of answers to one prompt
    rho_t = exp(log pi(y_t) - log pi_old(y_t))
    l_t   = max(-rho_t A_i, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_i) + kl_coef KL_t - entropy_coef H_t

What differs from PPO (arXiv 1707.06347): no critic; the group mean is the baseline; the KL to the reference is a loss
term, not part of the reward. What is selectable here: `std_normalization = false` leaves out the std; `eps_clip_high`
above `eps_clip` is DAPO's clip-higher (arXiv 2503.14476), which also takes `aggregation = "token"`; `dual_clip`;
`kl_place = "reward"` subtracts kl_coef times the sum of an answer's KL_t from r_i before groups are compared (in slime
the KL in the reward has no effect on group-relative advantages).
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.policy import compared, penalised_rewards, ppo_loss, spread
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] the group-relative reward of the answer at each of its trained positions."""
    rewards = penalised_rewards(batch, section)
    return spread(compared(rewards, batch, section, by_std=section.std_normalization), batch, section)


GRPO = Algorithm(name="grpo", advantages=advantages, loss=ppo_loss)
