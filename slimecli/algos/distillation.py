"""On-policy distillation: a teacher judges every token of the policy's own answers.

Papers: GKD (Agarwal et al., arXiv 2306.13649), MiniLLM (Gu et al., arXiv 2306.08543); as an advantage: "On-Policy
Distillation" (Thinking Machines Lab, 2025).

    A_t <- A_t - coef (log pi_old(y_t) - log teacher(y_t))          (only: A_t <- the second term alone)

It goes on top of any estimator and any of its losses. The term is the k1 estimate of KL(policy || teacher) of the next
token, so that its policy gradient is that of the per-token reverse KL; what later tokens cost is not charged to earlier
ones. It is added after rewards were compared and whitened: its size means what `coef` says.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.batch import TrainBatch
from slimecli.errors import DataError, SlimeError
from slimecli.recipe_algo import DistillSection


def teacher_gap(batch: TrainBatch) -> Tensor:
    """[T] log pi_old - log teacher of each trained token, 0 elsewhere: the estimate of the reverse KL."""
    if batch.teacher_log_probs is None:
        raise DataError(
            "[distill] is set, and the samples carry no teacher_log_probs",
            "generate them again with distill.url, or name a distill.teacher folder",
        )
    if batch.old_log_probs is None:
        raise SlimeError("distillation needs old_log_probs", "call Trainer.log_probs before algorithm.advantages")
    return (batch.old_log_probs - batch.teacher_log_probs) * batch.loss_mask


def distilled(batch: TrainBatch, section: DistillSection) -> TrainBatch:
    """The batch with the teacher's say in its advantages."""
    if batch.advantages is None:
        raise SlimeError("distillation adds to advantages", "call algorithm.advantages first")
    reward_part = batch.advantages * 0 if section.only else batch.advantages
    return batch.replace(advantages=reward_part - section.coef * teacher_gap(batch))
