"""`slime plan`: everything that is wrong with a recipe, and what it will take, before anything starts."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from slimecli.commands._options import JsonOpt, MegatronArgs, ModelOpt, RecipeOpt, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.plan import Plan
    from slimecli.plan_numbers import Value

EXAMPLES = [
    "slime plan --recipe quickstart",
    "slime plan --recipe quickstart --set rollout.batch_size=64 --set trainer.global_batch_size=512",
    "slime plan --run quickstart --measure",
]


def plan(
    recipe: str = "", run: str = "", model: str = "", overrides: tuple[str, ...] = (), *, measured: bool = False
) -> Plan:
    """The plan of a recipe, or of an existing run's recipe with changes.

    Args:
        recipe: shipped name or TOML file; empty with `run`: the run's own.
        measured: also measure this machine and estimate the time.
    """
    from slimecli.errors import RecipeError, UsageError
    from slimecli.plan import make_plan
    from slimecli.plan_checks import further_problems
    from slimecli.recipe import load_recipe, override_recipe
    from slimecli.rundir import open_run

    if run and (recipe or model):
        raise UsageError("--run plans with the run's own recipe", "leave out --recipe and --model, or leave out --run")
    if not run and not recipe and not model:
        raise UsageError("which recipe?", "slime plan --recipe quickstart; `slime recipes` lists them")
    if not run:
        try:
            loaded = load_recipe(recipe, overrides, model)
        except RecipeError as error:
            raise RecipeError(error.problems + further_problems(error), error.source) from None
        return make_plan(loaded, measured=measured)
    target = open_run(run)
    return make_plan(override_recipe(target.recipe(), overrides), run=target, measured=measured)


def cli(
    recipe: RecipeOpt = "",
    run: RunOpt = "",
    model: ModelOpt = "",
    set_: SetOpt = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure this machine and estimate the time")] = False,
    json_: JsonOpt = False,
    megatron: MegatronArgs = None,
) -> None:
    """Say what is wrong with a recipe, all at once, and what it will take."""
    from slimecli import console
    from slimecli.flags import megatron_overrides

    overrides = (*(set_ or ()), *megatron_overrides(megatron or ()))
    found = plan(recipe, run, model, overrides, measured=measure)
    if json_:
        console.emit(found.to_dict())
    else:
        rows = [{"what": f"{v.group}: {v.name}", "value": _shown(v), "why": v.reason} for v in found.values]
        console.table(rows, ["what", "value", "why"])
    for warning in found.warnings:
        console.warn(warning)
    if recipe:
        words = ["slime", "run", "--recipe", recipe, *(("--model", model) if model else ())]
        console.hint(shlex.join([*words, *(w for x in overrides for w in ("--set", x))]), "do it")


def _shown(value: Value) -> str:
    """A number as people read it."""
    if isinstance(value.value, str):
        return value.value
    if value.unit == "bytes":
        size, unit = float(value.value), "B"
        for bigger in ("kB", "MB", "GB", "TB"):
            if size < 1000:
                break
            size, unit = size / 1000, bigger
        return f"{size:,.1f} {unit}"
    number = f"{value.value:,.2f}" if isinstance(value.value, float) else f"{value.value:,}"
    return f"{number} {value.unit}".strip()
