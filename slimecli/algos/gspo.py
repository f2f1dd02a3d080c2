"""GSPO: group sequence policy optimisation.

Paper: Group Sequence Policy Optimization (arXiv 2507.18071).

    s_i = exp(mean_t(log pi(y_t) - log pi_old(y_t)))           over the trained tokens of answer i, with gradient
    l_t = max(-s_i A_i, -clip(s_i, 1 - eps_clip, 1 + eps_clip_high) A_i)        the same at every token of the answer

What differs from GRPO: ratio and clipping are of whole answers, length-normalised; advantages are GRPO's. The ratio of
an answer moves far less than that of a token, so clip ranges are small: the paper takes eps_clip = 3e-4 and
eps_clip_high = 4e-4. With `aggregation = "sample"` this is the paper's objective; with "token" an answer counts by its
length.
"""

from __future__ import annotations

from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.algos.functions import per_sample_mean, per_token
from slimecli.algos.grpo import advantages
from slimecli.algos.policy import clipped_loss, completed, log_ratio
from slimecli.recipe_algo import AlgoSection


def sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """[T] log s_i at every position of answer i."""
    mean = per_sample_mean(log_ratio(inputs), inputs.loss_mask, inputs.cu_seqlens)
    return per_token(mean, inputs.cu_seqlens)


def loss(inputs: LossInputs, section: AlgoSection) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] loss and metrics."""
    return completed(*clipped_loss(sequence_log_ratio(inputs), inputs, section), inputs, section)


GSPO = Algorithm(name="gspo", advantages=advantages, loss=loss)
