"""`slime rollout`: prompts and weights in, scored samples out: a step of a run, or a JSONL filter for offline data."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import AsOpt, JsonOpt, ModelOpt, RecipeOpt, RunOpt, SetOpt, refuse_idle

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime rollout --run quickstart",
    "slime rollout --model runs/quickstart/export --prompts 'runs/quickstart/data/holdout.jsonl@[0:8]' --out s.jsonl",
    "slime rollout --model http://127.0.0.1:30000 --recipe mine.toml --as sft:passing < prompts.jsonl > sft.jsonl",
    "slime rollout --model qwen3-0.6b --recipe mine.toml --prompts p.jsonl --shard 1/4 --out samples.1.jsonl",
]


def rollout_step(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """Collect the samples of the step after the newest checkpoint.

    Returns: {"step", "samples": path, "groups", "metrics"}.
    """
    from slimecli.errors import UsageError
    from slimecli.pipeline import PIPELINE
    from slimecli.publishing import load_folder
    from slimecli.session import Session, step_weights
    from slimecli.stage import require

    with contextlib.ExitStack() as stack:
        stack.enter_context(run.lock())  # first: whoever is at work there may be making what is missing
        require(PIPELINE, "loop", run, recipe)
        session = stack.enter_context(Session(run, recipe))
        done = run.last_checkpoint() or 0
        step = done + 1
        if run.data_state_path(step).is_file() and run.samples_path(step).is_file():
            raise UsageError(f"the samples of step {step} are there", f"slime train --run {run.quoted}")
        if step > recipe.steps:
            raise UsageError(
                f"run {run.name} is complete ({done} steps)",
                f"to go on: slime run --resume --run {run.quoted} --set steps={done * 2}",
            )
        run.new_attempt()
        weights = step_weights(run, recipe, done)
        engine = session.engine(weights)
        # by their version, so that samples carry it as they do in `slime run`
        session.aio.run(load_folder(engine, done, weights))
        source = session.source(done)
        collector = session.collector(source, session.generator(engine))
        collection = session.aio.run(collector.collect(step))
        session.recorder.record(collector, step, collection)
        session.recorder.settle()
    path = str(run.samples_path(step))
    return {"step": step, "samples": path, "groups": len(collection.groups), "metrics": collection.metrics}


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE|-", help="prompt file, or - for stdin; default: what is piped in")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE|-", help="JSONL file that a killed command goes on with, or -")
    ] = "-",
    shard: Annotated[str, typer.Option("--shard", metavar="I/N", help="every N-th prompt from the I-th on")] = "1/1",
    as_: AsOpt = "samples",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    json_: JsonOpt = False,
) -> None:
    """Generate and score answers: the next step of a run, or any prompt file with any model."""
    from slimecli import console
    from slimecli.errors import UsageError

    if bool(run) == bool(model):
        raise UsageError(
            "say --run NAME for the next step of a run, or --model DIR|URL < prompts.jsonl", "slime rollout --help"
        )
    if run:
        refuse_idle(
            {
                "--prompts": prompts,
                "--out": out != "-",
                "--shard": shard != "1/1",
                "--as": as_ != "samples",
                "--recipe": recipe,
            },
            "with --run: a step of a run has its own prompts, recipe and place",
            "leave it out, or say --model DIR|URL instead of --run",
        )
        from slimecli.commands._stages import run_and_recipe

        target, resolved = run_and_recipe(run, tuple(set_ or ()))
        result = rollout_step(target, resolved)
        console.say(f"step {result['step']}: {result['groups']} groups -> {result['samples']}")
        console.hint(f"slime train --run {target.quoted}")
    else:
        result = _offline(prompts, out, recipe, set_ or [], model, {"selection": as_, "shard": shard})
    if (json_ and out != "-") or (json_ and run):
        console.emit(result)


def _offline(
    prompts: str, out: str, recipe: str, overrides: list[str], model: str, how: dict[str, str]
) -> dict[str, Any]:
    from slimecli import console
    from slimecli.commands._offline import rollout_file
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe

    if not prompts and sys.stdin.isatty():
        raise UsageError("which prompts?", "--prompts FILE, or pipe JSONL in: slime rollout ... < prompts.jsonl")
    result = rollout_file(prompts or "-", out, load_recipe(recipe, tuple(overrides)), model, **how)
    if result["resumed_at"]:
        console.note(f"{out}: went on after row {result['resumed_at']}")
    left = "".join(f"; {n} left out: {reason}" for reason, n in result["left"].items())
    console.note(f"{result['prompts']} prompts, {result['samples']} answers, {result['written']} written{left}")
    return result
