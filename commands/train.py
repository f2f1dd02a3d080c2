"""`slime train`: samples and checkpoint k in, checkpoint and weights k+1 out; or the SFT stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, MegatronArgs, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime train --run quickstart",
    "slime train --run quickstart --stage sft",
]


def train_step(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """Learn from the samples that `slime rollout` left for the step after the newest checkpoint.

    Returns: {"step", "metrics", "checkpoint"}.
    """
    from slimecli.loop import loop
    from slimecli.session import Session

    with run.lock(), Session(run, recipe) as session:
        done = run.last_checkpoint() or 0
        run.new_attempt()
        run.rewind(done, samples_until=done + 1)
        loop(session.recorded_parts(done), done, done + 1)
    metrics = run.read_records(run.metrics_path)[-1]
    return {"step": done + 1, "metrics": metrics, "checkpoint": str(run.checkpoint_dir(done + 1))}


def train_sft(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """The SFT stage, in this process."""
    from slimecli.commands._stages import do_sft
    from slimecli.pipeline import PIPELINE
    from slimecli.stage import ensure, require

    with run.lock():  # first: whoever is at work there may be making what is missing
        require(PIPELINE, "sft", run, recipe)
        worked = ensure(PIPELINE["sft"], run, recipe, lambda: do_sft(run, recipe), _tell)
    return {"stage": "sft", "steps": recipe.sft.steps, "performed": worked}


def _tell(stage: str, state: str, detail: str) -> None:
    from slimecli import console

    console.say(f"{stage}: {state} ({detail})")


def cli(
    run: RunOpt,
    stage: Annotated[str, typer.Option("--stage", metavar="rl|sft", help="one RL step, or the SFT stage")] = "rl",
    set_: SetOpt = None,
    json_: JsonOpt = False,
    megatron: MegatronArgs = None,
) -> None:
    """Train on the samples of the next step, or on demonstrations; in several processes under torchrun."""
    from slimecli import env

    rank, world = env.distributed_rank()
    overrides = tuple(set_ or ())
    if world == 1:
        train(run, stage, overrides, megatron or [], json_=json_)
        return
    from slimecli.cluster.torchrun import follow, leading

    if rank:
        raise typer.Exit(follow())
    with leading():
        train(run, stage, overrides, megatron or [], json_=json_)


def train(run: str, stage: str, overrides: tuple[str, ...], megatron: list[str], *, json_: bool) -> None:
    """What `slime train` does in the process that people see."""
    from slimecli import console
    from slimecli.commands._stages import run_and_recipe, tell_backend
    from slimecli.errors import RecipeError, UsageError
    from slimecli.flags import megatron_overrides
    from slimecli.plan_layout import check_megatron

    target, recipe = run_and_recipe(run, (*overrides, *megatron_overrides(megatron)))
    if problems := list(check_megatron(recipe, target)):
        raise RecipeError(problems)
    if stage not in ("rl", "sft"):
        raise UsageError(f"--stage {stage!r}", "say rl or sft")
    if stage == "sft" and not recipe.sft.steps:
        raise UsageError(f"run {target.name} has no SFT stage (sft.steps = 0)", "--set sft.steps=100")
    tell_backend(target, recipe)
    result = train_sft(target, recipe) if stage == "sft" else train_step(target, recipe)
    if stage == "rl":
        console.say(f"step {result['step']}: loss {result['metrics']['train/loss']:.4f} -> {result['checkpoint']}")
        console.hint(f"slime rollout --run {target.quoted}")
    if json_:
        console.emit(result)
