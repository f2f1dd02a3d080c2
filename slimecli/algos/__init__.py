"""Algorithms: advantages and losses as pure functions of tensors, one file each.

An algorithm never sees micro-batches or ranks: advantages are computed over the whole rollout, and the per-token loss
is multiplied by weights whose denominators are global. A sample is never cut, so a loss may use whole sequences through
`cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from slimecli.data_tools.hooks import load_object
from slimecli.errors import UsageError
from slimecli.lookup import look_up
from slimecli.recipe_algo import AlgoSection

if TYPE_CHECKING:
    from slimecli.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss may depend on: [T] tensors of whole samples, one micro-batch, positions as in TrainBatch."""

    log_probs: Tensor
    """[T] of the current policy, with gradient; 0 where loss_mask is 0"""
    entropy: Tensor
    """[T] of the current policy's next-token distribution (nats), with gradient; 0 where loss_mask is 0"""
    old_log_probs: Tensor | None
    """[T]; None: the current policy's own"""
    ref_log_probs: Tensor | None
    """[T]; None: there is no reference"""
    rollout_log_probs: Tensor | None
    """[T] as the engine gave them; None: nothing was sampled"""
    advantages: Tensor
    """[T]"""
    loss_mask: Tensor
    """[T] float32, 1 where trained"""
    cu_seqlens: Tensor
    """[N+1] int64, where each sample starts"""


Advantages = Callable[["TrainBatch", AlgoSection], Tensor]
"""(all samples of a rollout, numbers) -> [T] advantages"""
Loss = Callable[[LossInputs, AlgoSection], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, numbers) -> [T] loss per token, and [T] metrics (no gradient) that are averaged over trained tokens"""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An advantage estimator with its loss."""

    name: str
    advantages: Advantages
    loss: Loss
    returns: Advantages | None = None
    """what the critic learns, [T]; None: there is no critic. With one, TrainBatch.values are set beforehand"""
    needs_rollout: bool = True
    """False: it learns from given data; logits are then not divided by the sampling temperature"""


ALGORITHMS: dict[str, str] = {
    "grpo": "slimecli.algos.grpo:GRPO",
    "dr_grpo": "slimecli.algos.dr_grpo:DR_GRPO",
    "gspo": "slimecli.algos.gspo:GSPO",
    "cispo": "slimecli.algos.cispo:CISPO",
    "rloo": "slimecli.algos.rloo:RLOO",
    "reinforce_plus_plus": "slimecli.algos.reinforce_plus_plus:REINFORCE_PLUS_PLUS",
    "reinforce_plus_plus_baseline": "slimecli.algos.reinforce_plus_plus_baseline:REINFORCE_PLUS_PLUS_BASELINE",
    "ppo": "slimecli.algos.ppo:PPO",
    "sft": "slimecli.algos.sft:SFT",
}


def algorithm(name: str) -> Algorithm:
    """The algorithm of a name, or the user's own: `file.py:OBJECT` or `module:OBJECT`.

    OBJECT is an Algorithm, or a function without arguments that returns one.
    """
    if ":" not in name and "." not in name:
        found: Algorithm = look_up(ALGORITHMS, name, "algorithm", "set algo.name to one of {known}")
        return found
    made = load_object(name)
    if callable(made):
        made = made()
    if not isinstance(made, Algorithm):
        raise UsageError(
            f"algo.name = {name!r} is a {type(made).__name__}", "name a slimecli.algos.Algorithm, or what returns one"
        )
    return made
