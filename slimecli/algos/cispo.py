"""CISPO: clipped importance-sampling policy optimisation.

Paper: MiniMax-M1 (arXiv 2506.13585).

    l_t = -sg(clip(rho_t, 1 - eps_clip, 1 + eps_clip_high)) A_i log pi(y_t)         sg: no gradient flows through it

What differs from GRPO: the importance weight is clipped, not the update, so that no token loses its gradient; rare
tokens that begin a new line of thought keep theirs. Advantages are GRPO's. The paper sets no lower bound: take
eps_clip = 1 or more, and a wide eps_clip_high, e.g. 4. Dual clip has nothing to act on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.algos.grpo import advantages
from slimecli.algos.policy import completed, log_ratio
from slimecli.recipe_algo import AlgoSection


def loss(inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] loss and metrics."""
    distance = log_ratio(inputs).detach()
    ratio = torch.exp(distance)
    weight = ratio.clamp(1 - section.eps_clip, 1 + section.eps_clip_high)
    surrogate = -weight * inputs.advantages * inputs.log_probs
    metrics = {"ppo_kl": -distance, "clip_fraction": (weight != ratio).float()}
    return completed(surrogate, metrics, inputs, section)


CISPO = Algorithm(name="cispo", advantages=advantages, loss=loss)
