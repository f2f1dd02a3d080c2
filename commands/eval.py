"""`slime eval`: held-out accuracy of a run's step, an HF folder or a running server; and two such scores compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, ModelOpt, RecipeOpt, RunOpt, SetOpt, refuse_idle

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime eval --run quickstart",
    "slime eval --model runs/quickstart/export --recipe quickstart --data runs/quickstart/data/holdout.jsonl",
    "slime eval --model http://127.0.0.1:30000 --recipe mine.toml --data aime=aime.jsonl --data gsm8k=gsm8k.jsonl",
    "slime eval --run quickstart --set eval.sets.aime='{path=\"aime.jsonl\", n_samples_per_prompt=8}' --json",
    "slime eval --compare quickstart@0 quickstart",
]


def evaluate_weights(run: RunDir, recipe: Recipe, weights: Path) -> dict[str, dict[str, Any]]:
    """Evaluate an HF folder on the run's sets; it is loaded once and not looked at again.

    Returns: set name -> {"sampled", "greedy"} -> result of slimecli.rollout.evaluate.evaluate.
    """
    from slimecli.rollout.evaluate import evaluate
    from slimecli.session import Session

    modes = {"sampled": False} | ({"greedy": True} if recipe.eval.greedy else {})
    scores: dict[str, dict[str, Any]] = {}
    with Session(run, recipe) as session:
        sets = session.eval_sets()
        generator = session.generator(session.engine(weights))
        for mode, greedy in modes.items():
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
        return "it was made with --set or --data"
    try:
        files.write_json(run.eval_path(record["step"]), record)
    except SlimeError as error:
        return error.what
    return ""


def evaluate_model(model: str, recipe: Recipe) -> dict[str, Any]:
    """Evaluate an HF folder, a registry model, or the server at a URL on eval.sets; nothing is stored.

    Returns: {"model", "sets": see evaluate_weights}.
    """
    from slimecli.commands._targets import open_target

    folder, recipe = open_target(model, recipe)
    return {"model": model, "sets": evaluate_folder(folder, recipe)}


def evaluate_folder(weights: Path, recipe: Recipe, model_dir: Path | None = None) -> dict[str, dict[str, Any]]:
    """`evaluate_weights` without a run of its own.

    Args:
        model_dir: where the tokenizer is; None: beside the weights.
    """
    import tempfile

    from slimecli.rundir import RunDir

    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir(Path(scratch))
        run.model_dir.parent.mkdir()
        run.model_dir.symlink_to((model_dir or weights).resolve())
        return evaluate_weights(run, recipe, weights)


def named_sets(words: list[str]) -> tuple[str, ...]:
    """`[NAME=]FILE` words as one override of eval.sets; a file without a name goes by its path."""
    from slimecli.errors import UsageError

    sets = {}
    for word in words:
        name, sep, path = word.partition("=")
        name, path = (name, path) if sep else (word, word)
        if name in sets:
            raise UsageError(f"--data names {name!r} twice", "give each set a name of its own: --data NAME=FILE")
        sets[name] = path
    listed = ", ".join(f"{json.dumps(name)} = {json.dumps(path)}" for name, path in sets.items())
    return (f"eval.sets={{{listed}}}",) if sets else ()


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="score on this set instead of the recipe's; repeatable"),
    ] = None,
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    compare: Annotated[
        tuple[str, str],
        typer.Option("--compare", metavar="A B", help="difference of two evaluations: files, runs or RUN@STEP"),
    ] = ("", ""),
    anyway: Annotated[bool, typer.Option("--anyway", help="compare what was measured differently, too")] = False,
    json_: JsonOpt = False,
) -> None:
    """Score held-out problems, sampled and greedy, or compare two such scores. --model may be a server's URL."""
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe

    if any(compare):
        if run or model or data or recipe or set_ or step is not None:
            raise UsageError("--compare reads evaluations that were made", "slime eval --compare A B, and nothing else")
        _compare(*compare, anyway=anyway, as_json=json_)
        return
    if bool(run) == bool(model):
        raise UsageError("say --run NAME, or --model DIR|URL --data FILE", "see `slime eval --help`")
    refuse_idle({"--anyway": anyway}, "without --compare", "slime eval --compare A B --anyway")
    overrides = (*named_sets(data or []), *(set_ or ()))  # in this order --set reaches into a set of --data
    if run:
        refuse_idle({"--recipe": recipe}, "with --run: a run has its own", "--set KEY=VALUE changes single values")
        _score_run(run, overrides, step, bool(data), json_)
        return
    refuse_idle({"--step": step is not None}, "with --model", "slime eval --run NAME --step N")
    resolved = load_recipe(recipe, overrides)
    if not resolved.eval.sets:
        raise UsageError("which data?", "--data FILE, e.g. runs/NAME/data/holdout.jsonl")
    _tell(evaluate_model(model, resolved), "", json_)


def _score_run(run: str, overrides: tuple[str, ...], step: int | None, own_data: bool, as_json: bool) -> None:
    from slimecli.commands._stages import run_and_recipe
    from slimecli.session import step_weights

    target, resolved = run_and_recipe(run, overrides)
    if own_data:  # these sets alone, without the run's holdout
        number = (target.last_checkpoint() or 0) if step is None else step
        weights = step_weights(target, resolved, number)
        result = {"step": number, "sets": evaluate_folder(weights, resolved, target.model_dir)}
    else:
        result = evaluate_step(target, resolved, step)
    _tell(result, store_scores(target, resolved, result), as_json)


def _tell(result: dict[str, Any], unstored: str, as_json: bool) -> None:
    from slimecli import console
    from slimecli.errors import PartialError

    if as_json:
        console.emit(result)
    else:
        _show(result)
    if unstored:
        console.warn(f"this result is not stored in the run: {unstored}")
    failed = sum(r["failed"] for modes in result["sets"].values() for r in modes.values())
    if failed:
        raise PartialError(f"{failed} answers failed and are not in the scores", "mend the cause and evaluate again")


def _show(result: dict[str, Any]) -> None:
    from slimecli import console

    columns = ["set", "mode", "score", "95 %", "pass@k", "answers", "length", "truncated", "failed", "spec"]
    rows = []
    for name, modes in result["sets"].items():
        for mode, r in modes.items():
            passed = [f"@{k} {value:.3f}" for k, value in r["pass@k"].items() if int(k) > 1]
            rows.append(
                {
                    "set": name,
                    "mode": mode,
                    "score": f"{r['mean']:.3f}" + (f" (avg@{r['samples_per_prompt']})" if passed else ""),
                    "95 %": f"{r['interval'][0]:.3f} - {r['interval'][1]:.3f}",
                    "pass@k": " ".join(passed),
                    "answers": f"{r['n']} to {r['prompts']}",
                    "length": f"{r['response_length']:.1f}",
                    "truncated": f"{r['truncated']:.1%}",
                    "failed": r["failed"],
                    "spec": r["spec_hash"],
                }
            )
    console.table(rows, columns)


def _compare(first: str, second: str, *, anyway: bool, as_json: bool) -> None:
    from slimecli import console
    from slimecli.rollout.comparison import compare

    result = compare(first, second, anyway=anyway)
    for place, kinds in result["only_in"].items():
        for name, mode in kinds:
            console.note(f"only in {result[place]}: {name}, {mode}")
    for row in result["rows"]:
        for field, a, b in row["differs"]:
            console.warn(f"{row['set']}, {row['mode']}: measured with another {field}: {a!r} | {b!r}")
    if as_json:
        console.emit(result)
        return
    rows = [
        {
            "set": row["set"],
            "mode": row["mode"],
            "a": f"{row['a']:.3f}",
            "b": f"{row['b']:.3f}",
            "b - a": f"{row['difference']:+.3f}",
            "95 %": f"{row['interval'][0]:+.3f} - {row['interval'][1]:+.3f}",
            "prompts": row["prompts"],
            "how": "paired" if row["paired"] else "unpaired",
        }
        for row in result["rows"]
    ]
    console.table(rows, ["set", "mode", "a", "b", "b - a", "95 %", "prompts", "how"])
