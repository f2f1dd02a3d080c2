"""Small batches, and a whole step's loss as a trainer computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slimecli.algos import Algorithm, LossInputs
from slimecli.batch import TrainBatch, from_groups, weigh
from slimecli.recipe_algo import AlgoSection
from slimecli.types import Sample, SampleStatus


def batch(groups: Sequence[Sequence[tuple[float, Sequence[int]]]]) -> TrainBatch:
    """Groups of (reward, loss mask of the answer); each prompt is one token, so the answer's masks come first.

    The mask of answer [1, 0, 1] stands at positions 0, 1, 2 of its 4 tokens.
    """
    made = [
        [
            Sample(
                tokens=[1, *[2] * len(mask)],
                response_length=len(mask),
                reward=reward,
                group_index=g,
                loss_mask=list(mask),
                status=SampleStatus.COMPLETED,
            )
            for reward, mask in group
        ]
        for g, group in enumerate(groups)
    ]
    packed = from_groups(made, temperature=1.0)
    return packed.replace(values=torch.zeros_like(packed.loss_mask))


def random_batch(seed: int = 0, sizes: Sequence[int] = (4, 1, 3, 2)) -> TrainBatch:
    """Groups of several sizes, answers of several lengths with holes, and log-probs of all four policies."""
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    made = batch(
        [[(float(number(3)), [1, *[number(2) for _ in range(number(6))], 1]) for _ in range(n)] for n in sizes]
    )

    def log_probs(around: Tensor, spread: float) -> Tensor:
        return (around + spread * torch.randn(len(around), generator=generator)) * made.loss_mask

    old = log_probs(torch.full_like(made.loss_mask, -2.0), 0.5)
    made = made.replace(old_log_probs=old, rollout_log_probs=log_probs(old, 0.3), ref_log_probs=log_probs(old, 0.3))
    return made.replace(values=torch.randn(len(old), generator=generator) * made.loss_mask)


def policy(made: TrainBatch, seed: int = 1) -> Tensor:
    """[T] log-probs of a policy some way off the old one, with gradient."""
    old = made.old_log_probs
    assert old is not None
    away = 0.2 * torch.randn(len(old), generator=torch.Generator().manual_seed(seed))
    return ((old + away) * made.loss_mask).requires_grad_()


def inputs(made: TrainBatch, log_probs: Tensor) -> LossInputs:
    """What a trainer gives the loss."""
    assert made.advantages is not None
    return LossInputs(
        log_probs=log_probs,
        entropy=log_probs.square() * made.loss_mask,
        old_log_probs=made.old_log_probs,
        ref_log_probs=made.ref_log_probs,
        rollout_log_probs=made.rollout_log_probs,
        advantages=made.advantages,
        loss_mask=made.loss_mask,
        cu_seqlens=made.cu_seqlens,
    )


def ready(algorithm: Algorithm, section: AlgoSection, made: TrainBatch) -> TrainBatch:
    """With advantages and loss weights."""
    return weigh(made.replace(advantages=algorithm.advantages(made, section)), section.aggregation, 8)


def step_loss(algorithm: Algorithm, section: AlgoSection, made: TrainBatch, log_probs: Tensor) -> Tensor:
    """[] weighted loss of a batch that is `ready`."""
    per_token, _ = algorithm.loss(inputs(made, log_probs), section)
    return (per_token * made.loss_weight).sum()
