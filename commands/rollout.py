"""`slime rollout`: prompts and weights in, scored samples out: a step of a run, or a JSONL filter for offline data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, ModelOpt, RecipeOpt, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime rollout --run quickstart",
    "slime rollout --model runs/quickstart/export --prompts 'runs/quickstart/data/holdout.jsonl@[0:8]' --out s.jsonl",
]


def rollout_step(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """Collect the samples of the step after the newest checkpoint.

    Returns: {"step", "samples": path, "groups", "metrics"}.
    """
    from slimecli.errors import UsageError
    from slimecli.pipeline import PIPELINE
    from slimecli.session import Session, step_weights
    from slimecli.stage import require

    require(PIPELINE, "loop", run, recipe)
    with run.lock(), Session(run, recipe) as session:
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
        engine = session.engine(step_weights(run, recipe, done))
        session.aio.run(_label_weights(session, engine, done))
        source = session.source(done)
        collector = session.collector(source, session.generator(engine))
        collection = session.aio.run(collector.collect(step))
        session.recorder.record(source, step, collection)
        session.recorder.settle()
    path = str(run.samples_path(step))
    return {"step": step, "samples": path, "groups": len(collection.groups), "metrics": collection.metrics}


async def _label_weights(session: Any, engine: Any, version: int) -> None:
    """Load the step's weights by their version, so that samples carry it as they do in `slime run`."""
    from slimecli.protocols import WeightUpdate
    from slimecli.session import step_weights

    folder = step_weights(session.run, session.recipe, version)
    await engine.update_weights(WeightUpdate(kind="disk", version=version, folder=folder))


def rollout_file(prompts: str, out: str, recipe: Recipe, model_dir: Path) -> dict[str, Any]:
    """Answer every prompt of a file (or stdin) with a model; nothing of a run is needed.

    Args:
        prompts: JSONL or parquet file, with optional slice; `-` is JSONL on stdin.
        out: JSONL file of samples, or `-` for stdout.
    """
    from slimecli import files
    from slimecli.errors import PartialError
    from slimecli.types import SampleStatus

    lines: list[str] = []
    failed = 0
    for group in _answer_all(prompts, recipe, model_dir):
        for sample in group:
            failed += sample.status is SampleStatus.FAILED
            line = sample.to_json()
            if out == "-":
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            lines.append(line)
    if out != "-":
        files.write_text(Path(out), "".join(f"{line}\n" for line in lines))
    if failed:
        raise PartialError(
            f"{failed} of {len(lines)} answers failed; they are in the output with status `failed`",
            "see metadata.failure of those samples",
        )
    return {"samples": len(lines), "out": out}


def _answer_all(prompts: str, recipe: Recipe, model_dir: Path) -> Iterator[Any]:
    """Groups in prompt order, `rollout.batch_size` prompts in flight."""
    import asyncio
    import tempfile

    from slimecli.rollout.sampling import rollout_sampling, rollout_seed
    from slimecli.rundir import RunDir
    from slimecli.session import Session

    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir(Path(scratch))
        run.model_dir.parent.mkdir()
        run.model_dir.symlink_to(model_dir.resolve())
        with Session(run, recipe) as session:
            rows = session.prompts("<stdin>", sys.stdin.buffer) if prompts == "-" else session.prompts(prompts)
            engine = session.engine(model_dir)
            generator = session.generator(engine)
            sampling = rollout_sampling(recipe, session.stop_token_ids)

            async def answer(number: int) -> Any:
                n = recipe.rollout.n_samples_per_prompt
                group = rows[number].copies(n)
                for i, sample in enumerate(group):
                    sample.group_index, sample.index = number, number * n + i
                seeds = [{"sampling_seed": rollout_seed(recipe, 0, number, i)} for i in range(n)]
                return await generator.group(group, [sampling | s for s in seeds])

            async def batch(numbers: range) -> list[Any]:
                return await asyncio.gather(*(answer(i) for i in numbers))

            size = recipe.rollout.batch_size
            for first in range(0, len(rows), size):
                yield from session.aio.run(batch(range(first, min(first + size, len(rows)))))


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    prompts: Annotated[str, typer.Option("--prompts", metavar="FILE|-", help="prompt file, or - for stdin")] = "",
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE|-", help="samples as JSONL, or - for stdout")] = "-",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    json_: JsonOpt = False,
) -> None:
    """Generate and score answers: the next step of a run, or any prompt file with any model."""
    from slimecli import console
    from slimecli.errors import UsageError

    if bool(run) == bool(model):
        raise UsageError("say --run NAME for the next step of a run, or --model DIR --prompts FILE", "see --help")
    if run:
        from slimecli.commands._stages import run_and_recipe

        target, resolved = run_and_recipe(run, tuple(set_ or ()))
        result = rollout_step(target, resolved)
        console.say(f"step {result['step']}: {result['groups']} groups -> {result['samples']}")
        console.hint(f"slime train --run {target.quoted}")
    else:
        if not prompts:
            raise UsageError("which prompts?", "--prompts FILE, or --prompts - for JSONL on stdin")
        from slimecli.recipe import load_recipe
        from slimecli.weights.source import resolve_model_dir

        resolved = load_recipe(recipe, tuple(set_ or ()))
        result = rollout_file(prompts, out, resolved, resolve_model_dir(model))
    if json_:
        console.emit(result)
