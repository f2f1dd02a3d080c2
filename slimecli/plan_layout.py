"""Is a model divided over trainer processes in a way that can be? Checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from slimecli.errors import SlimeError
from slimecli.plan_machine import gpu_memories
from slimecli.plan_spec import model_spec
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.trainers.megatron.arguments import problems_of


def check_megatron(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether the model can be divided as asked, and whether megatron-core knows the arguments."""
    if recipe.trainer.backend != "megatron":
        return
    try:
        spec = model_spec(recipe, run)
    except SlimeError:
        return  # told by the check of the model
    try:
        yield from problems_of(recipe, spec, on_gpu=bool(gpu_memories()))
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"
