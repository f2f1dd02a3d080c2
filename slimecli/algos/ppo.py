"""PPO: proximal policy optimisation with a trained critic.

Paper: Proximal Policy Optimization (arXiv 1707.06347), GAE (arXiv 1506.02438); for language models arXiv 2203.02155.

    r_t     = -kl_coef KL_t, + r_i at the last trained token   the KL only with kl_place = "reward"
    delta_t = r_t + gamma V_{t+1} - V_t                        V = 0 after the last trained token
    A_t     = sum_{k >= 0} (gamma gae_lambda)^k delta_{t+k}
    policy: l_t = max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t) + kl and entropy terms
    critic: l_t = max((V - R_t)^2, (V_old + clamp(V - V_old, -value_clip, value_clip) - R_t)^2),  R_t = A_t + V_old

What differs from GRPO: the baseline is a model's estimate at every token instead of the group's mean, so one answer per
prompt will do, and credit differs between tokens. The critic has the policy's shape and first weights, a head that
starts at 0, and its own optimizer; for the first `critic_warmup` steps only it learns. `whiten_advantages` is usual;
what the critic learns stays unwhitened. Tokens that are not trained (a tool's output) take no time.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.functions import whiten
from slimecli.algos.policy import ppo_loss, token_penalty
from slimecli.algos.returns import at_last_step, gae
from slimecli.batch import TrainBatch
from slimecli.errors import SlimeError
from slimecli.recipe_algo import AlgoSection


def estimates(batch: TrainBatch, section: AlgoSection) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns from the critic's values before the step."""
    if batch.values is None:
        raise SlimeError("the batch has no values", 'set them by Trainer.log_probs(batch, "critic")')
    mask, bounds = batch.loss_mask, batch.cu_seqlens
    rewards = at_last_step(batch.rewards, mask, bounds) - token_penalty(batch, section)
    return gae(rewards, batch.values, mask, bounds, section.gamma, section.gae_lambda)


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] generalised advantages, whitened if asked."""
    values = estimates(batch, section)[0]
    return whiten(values, batch.loss_mask) if section.whiten_advantages else values


def returns(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] what the critic learns."""
    return estimates(batch, section)[1]


PPO = Algorithm(name="ppo", advantages=advantages, loss=ppo_loss, returns=returns)
