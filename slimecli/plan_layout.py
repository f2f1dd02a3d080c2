"""Can trainer processes and engines be started as the recipe says? Checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from slimecli.engines.router.programs import find as find_router
from slimecli.engines.router.programs import words as router_words
from slimecli.engines.sglang.arguments import problems_of as sglang_problems
from slimecli.errors import RecipeError, SlimeError
from slimecli.placement import demand_of
from slimecli.plan_machine import gpu_memories, runs_on_gpus
from slimecli.plan_spec import frozen_problems, model_spec
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.topology import topology_problems
from slimecli.trainers.megatron.arguments import problems_of
from slimecli.trainers.megatron.layout import group_size


def check_megatron(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether the model can be divided as asked, and whether megatron-core knows the arguments."""
    if recipe.trainer.backend != "megatron":
        return
    try:
        spec = model_spec(recipe, run)
    except SlimeError:
        return  # told by the check of the model
    try:
        yield from problems_of(recipe, spec, on_gpu=runs_on_gpus(recipe, len(gpu_memories())))
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"


def check_sglang(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether the installed SGLang knows the arguments, and weights can reach its servers."""
    if recipe.engine.backend != "sglang":
        return
    if recipe.sync.kind == "in_process":
        yield "`sync.kind` = 'in_process' does not reach SGLang servers; take 'tensor', 'disk' or 'distributed'"
    if not recipe.engine.urls:
        yield from sglang_problems(recipe)


def check_router(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether the router is installed and knows the arguments."""
    name = recipe.engine.router
    if name == "none":
        if recipe.router:
            yield "`[router]` is given, but `engine.router` is 'none'"
        return
    if name == "auto":
        if not recipe.router:
            return
        name = "smg" if find_router("smg") else "builtin"
    try:
        router_words(name, recipe.router)
    except RecipeError as error:
        yield from error.problems
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"


def check_topology(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether groups of servers and served models make sense, and the models are there."""
    yield from topology_problems(recipe)
    for model in recipe.engine.models:
        for problem in frozen_problems(model.path, has_weights=recipe.engine.backend == "embedded"):
            yield f"`engine.models` {model.name!r}: {model.path!r}: {problem}"


def check_placement(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Whether trainer and engines can be laid over GPUs as asked. How many there are only a cluster knows."""
    try:
        group = group_size(recipe)
    except (TypeError, ValueError):
        return  # told by the check of Megatron's arguments
    problem = demand_of(recipe, group, gpus=0).problem() if group > 0 else ""
    if problem:
        yield f"`cluster.placement` = {recipe.cluster.placement!r}: {problem}"
    if recipe.cluster.placement != "colocated" or not recipe.steps:
        return
    if recipe.engine.urls:
        yield "`cluster.placement` = 'colocated': engines that already run (`engine.urls`) share no GPUs with a trainer"
    if recipe.rollout.overlaps:
        yield (
            "`cluster.placement` = 'colocated': trainer and engines take turns, and `rollout.max_staleness` or "
            "`rollout.fully_async` has them work at the same time; set it to 'disaggregated'"
        )
