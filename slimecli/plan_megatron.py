"""What `slime plan` says of a Megatron trainer: what is wrong with its layout and arguments, and what it decides."""

from __future__ import annotations

from collections.abc import Iterator

from slimecli.errors import SlimeError
from slimecli.plan_spec import model_spec
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.trainers.megatron.arguments import problems_of


def check_megatron(recipe: Recipe, run: RunDir | None, *, on_gpu: bool | None = None) -> Iterator[str]:
    """Whether the model can be divided as asked, and whether megatron-core knows the arguments.

    Args:
        on_gpu: whether it will train on GPUs; None: as this machine is.
    """
    if recipe.trainer.backend != "megatron":
        return
    try:
        spec = model_spec(recipe, run)
    except SlimeError:
        return  # told by the check of the model
    try:
        yield from problems_of(recipe, spec, on_gpu=_has_gpu() if on_gpu is None else on_gpu)
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"


def _has_gpu() -> bool:
    from slimecli.plan_machine import gpu_memories

    return bool(gpu_memories())
