"""`slime eval`: held-out accuracy of a run's step, an HF folder or a server that already runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, ModelOpt, RecipeOpt, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime eval --run quickstart",
    "slime eval --model runs/quickstart/export --recipe quickstart --data runs/quickstart/data/holdout.jsonl",
]


def evaluate_weights(run: RunDir, recipe: Recipe, weights: Path) -> dict[str, dict[str, Any]]:
    """Evaluate an HF folder on the run's sets; it is loaded once and not looked at again.

    Returns: set name -> {"sampled", "greedy"} -> result of slimecli.rollout.evaluate.summarise.
    """
    from slimecli.rollout.evaluate import evaluate
    from slimecli.session import Session

    scores: dict[str, dict[str, Any]] = {}
    with Session(run, recipe) as session:
        sets = session.eval_sets()
        generator = session.generator(session.engine(weights))
        for mode, greedy in (("sampled", False), ("greedy", True)):
            work = evaluate(recipe, generator, sets, session.stop_token_ids, greedy=greedy)
            for name, result in session.aio.run(work).items():
                scores.setdefault(name, {})[mode] = result
    return scores


def evaluate_step(run: RunDir, recipe: Recipe, step: int | None) -> dict[str, Any]:
    """Evaluate the weights of a step (default: the newest), sampled and greedy.

    Returns: {"step", "sets": see evaluate_weights}.
    """
    from slimecli.errors import MissingStageError
    from slimecli.session import step_weights

    number = (run.last_checkpoint() or 0) if step is None else step
    weights = step_weights(run, recipe, number)
    try:
        scores = evaluate_weights(run, recipe, weights)
    except FileNotFoundError as error:
        if weights.exists():
            raise
        raise MissingStageError(
            f"the weights of step {number} went away while they were read ({error.filename}): the run goes on, and "
            f"keeps the newest {recipe.checkpoint.keep}",
            f"slime eval --run {run.quoted}",
        ) from None
    return {"step": number, "sets": scores}


def store_scores(run: RunDir, recipe: Recipe, record: dict[str, Any]) -> str:
    """Keep an evaluation in the run; returns why not, or an empty string.

    The file replaces the step's older one at once: a run that is being trained may be evaluated. What was made with
    another recipe than the run's own would pass for the run's.
    """
    from slimecli import files
    from slimecli.errors import SlimeError

    if recipe != run.recipe():
        return "it was made with --set"
    try:
        files.write_json(run.eval_path(record["step"]), record)
    except SlimeError as error:
        return error.what
    return ""


def evaluate_model(model: str, recipe: Recipe, data: str) -> dict[str, Any]:
    """Evaluate an HF folder on one file; nothing is stored."""
    import tempfile

    from slimecli.rundir import RunDir
    from slimecli.weights.source import resolve_model_dir

    weights = resolve_model_dir(model)
    narrowed = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"sets": {"data": data}})})
    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir(Path(scratch))
        run.model_dir.parent.mkdir()
        run.model_dir.symlink_to(weights.resolve())
        modes = evaluate_weights(run, narrowed, weights)["data"]
    return {"model": model, "sets": {data: modes}}


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="prompt file, for --model")] = "",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    json_: JsonOpt = False,
) -> None:
    """Score held-out problems, sampled and greedy."""
    from slimecli import console
    from slimecli.commands._stages import run_and_recipe
    from slimecli.errors import PartialError, UsageError
    from slimecli.recipe import load_recipe

    if bool(run) == bool(model):
        raise UsageError("say --run NAME, or --model DIR --data FILE", "see `slime eval --help`")
    if model and not data:
        raise UsageError("which data?", "--data FILE, e.g. runs/NAME/data/holdout.jsonl")
    overrides = tuple(set_ or ())
    if run:
        target, resolved = run_and_recipe(run, overrides)
        result = evaluate_step(target, resolved, step)
        unstored = store_scores(target, resolved, result)
    else:
        result, unstored = evaluate_model(model, load_recipe(recipe, overrides), data), ""
    _show(result, as_json=json_)
    if unstored:
        console.warn(f"this result is not stored in the run: {unstored}")
    failed = sum(r["failed"] for modes in result["sets"].values() for r in modes.values())
    if failed:
        raise PartialError(f"{failed} answers failed and are not in the scores", "mend the cause and evaluate again")


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    from slimecli import console

    rows = [
        {
            "set": name,
            "mode": mode,
            "accuracy": f"{r['mean']:.3f} ± {1.96 * r['stderr']:.3f}",
            "answers": r["n"],
            "length": f"{r['response_length']:.1f}",
            "truncated": f"{r['truncated']:.1%}",
            "failed": r["failed"],
            "spec": r["spec"],
        }
        for name, modes in result["sets"].items()
        for mode, r in modes.items()
    ]
    if as_json:
        console.emit(result)
    else:
        console.table(rows, ["set", "mode", "accuracy", "answers", "length", "truncated", "failed", "spec"])
