"""REINFORCE++-baseline: group-centred rewards, whitened over the batch.

Paper: REINFORCE++ (arXiv 2501.03262), the variant for several answers to a prompt.

    A'_t = r_i - mean(r) - kl_coef KL_t                        mean over the group; the KL only with kl_place = "reward"
    A_t  = (A'_t - mean(A')) / sqrt(var(A') + 1e-8)            mean and unbiased variance over all trained tokens

What differs from REINFORCE++: the group mean is taken off first, and a token bears its own KL only, not that of the
tokens after it (as in slime). What differs from GRPO: the scale is the batch's, not the group's, so a group with a tiny
std is not blown up. The paper has the KL as a k2 loss: `kl_place = "loss"`, `kl_type = "k2"`.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.functions import per_token, whiten
from slimecli.algos.policy import compared, ppo_loss, token_penalty
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection


def advantages(batch: TrainBatch, section: AlgoSection) -> Tensor:
    """[T] whitened group-centred rewards."""
    centred = compared(batch.rewards, batch, section, by_std=False)
    values = per_token(centred, batch.cu_seqlens) - token_penalty(batch, section)
    return whiten(values * batch.loss_mask, batch.loss_mask)


REINFORCE_PLUS_PLUS_BASELINE = Algorithm(name="reinforce_plus_plus_baseline", advantages=advantages, loss=ppo_loss)
