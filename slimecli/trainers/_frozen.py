"""Models beside the policy that are never trained: reference, teacher, old policy. What both trainers say of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from slimecli.batch import TrainBatch
from slimecli.errors import DataError, SlimeError
from slimecli.protocols import ModelName
from slimecli.recipe import Recipe

WAYS: dict[ModelName, tuple[str, str]] = {
    "critic": ("critic", "set algo.name to ppo"),
    "reference": ("reference model", "set algo.kl_coef above 0"),
    "teacher": ("teacher", "set distill.teacher to a model folder"),
    "old_policy": ("old policy", 'set algo.old_log_probs to "published"'),
}
"""model -> (what it is called, how to have one)"""


def lacking(name: ModelName) -> SlimeError:
    """The error of asking for a model that the recipe did not ask for."""
    what, fix = WAYS[name]
    return SlimeError(f"this trainer holds no {what}", fix)


def teacher_folder(recipe: Recipe) -> Path | None:
    """The HF folder of the teacher that the trainer is to hold."""
    folder = recipe.distill.teacher
    return Path(folder).expanduser() if folder else None


def check_tokens(batch: TrainBatch, vocab: int) -> None:
    """A teacher with a smaller vocabulary reads the policy's tokens as long as it knows them."""
    highest = int(batch.tokens.max())
    if highest >= vocab:
        raise DataError(
            f"token {highest} is none of the teacher's, whose embedding has {vocab} rows",
            "take a teacher with the policy's tokenizer",
        )


class HostCopy:
    """The weights of a live model at some time, in (pinned, where there is a GPU) host memory."""

    def __init__(self, live: Callable[[], list[Tensor]]) -> None:
        """Args:
        live: the tensors of the model, in the same order whenever it is asked.
        """
        self._live = live
        self._tensors = [_to_host(t) for t in live()]

    def refresh(self) -> None:
        """Take the weights of now."""
        _fill(self._tensors, self._live())

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The live model has these weights inside, and its own again afterwards, bit for bit."""
        live = self._live()
        own = [_to_host(t) for t in live]
        try:
            _fill(live, self._tensors)
            yield
        finally:
            _fill(live, own)


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach())


def _fill(targets: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
