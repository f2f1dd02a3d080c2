"""`slime prepare-data`: any source -> validated prompts, held-out prompts and demonstrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, ModelOpt, OutOpt, RecipeOpt, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.data_tools.prepare import Report
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime prepare-data --recipe quickstart --run quickstart",
    "slime prepare-data --input questions.jsonl --out prepared --set data.input_key=question",
    "slime prepare-data --run quickstart --show 3",
    "slime prepare-data --list",
]

_MAKER = "slime prepare-data"


def prepare_data(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Write train.jsonl, holdout.jsonl and sft.jsonl as one committed folder; the report stands in its DONE.json.

    Args:
        out: folder to make; one that this command made before is replaced, any other is refused.

    Returns: {"kept": {file: rows}, "dropped": {reason: rows}, ...}.
    """
    from slimecli import files
    from slimecli.data_tools.prepare import Report, prepare
    from slimecli.errors import UsageError
    from slimecli.rollout.eval_sets import set_recipe
    from slimecli.weights.datasets import localise

    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not _is_ours(out):
        raise UsageError(f"{out} exists and was not made by slime prepare-data", "choose another --out folder")
    if not (recipe.data.train or recipe.data.source or recipe.sft.data):  # before a tokenizer is fetched for it
        if recipe.only_evaluates:
            raise UsageError("this recipe trains nothing", "slime eval --model DIR --recipe NAME is what it is for")
        raise UsageError("the recipe names no data", "--input FILE, or --set data.train=FILE")
    tokenizer = _tokenizer(recipe)
    evaluation = [(localise(s.path), set_recipe(recipe, s).data) for s in recipe.eval.sets.values()]
    train = "" if recipe.data.is_live else localise(recipe.data.train)
    manifest: dict[str, Any] = {"made_by": _MAKER}
    with files.committed_folder(out, manifest) as folder:
        if recipe.data.is_live and not recipe.sft.data:  # conversations have yet to be held
            report = Report()
        else:
            report = prepare(
                recipe.data.model_copy(update={"train": train}),
                recipe.sft.model_copy(update={"data": localise(recipe.sft.data)}),
                folder,
                seed=recipe.seed,
                tokenizer=tokenizer,
                exclude=evaluation,
            )
        _check_enough(recipe, report)
        manifest |= report.to_dict()
    return report.to_dict()


def prepare_run_data(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """The data stage of a run."""
    return prepare_data(recipe, run.data_dir)


def _is_ours(folder: Path) -> bool:
    from slimecli import files

    done = folder / files.DONE
    return done.is_file() and files.read_json(done).get("made_by") == _MAKER


def _check_enough(recipe: Recipe, report: Report) -> None:
    """Fewer rows than one batch cannot train anything."""
    from slimecli.errors import DataError

    train, sft = report.kept.get("train", 0), report.kept.get("sft", 0)
    if recipe.steps and not recipe.data.is_live and train < recipe.rollout.batch_size:
        raise DataError(
            f"{train} prompts are fewer than one batch (rollout.batch_size = {recipe.rollout.batch_size})",
            "bring more data or lower rollout.batch_size",
        )
    if recipe.sft.steps and sft < recipe.sft.batch_size:
        raise DataError(
            f"{sft} demonstrations are fewer than one batch (sft.batch_size = {recipe.sft.batch_size})",
            "set data.demonstrations or sft.data, or lower sft.batch_size",
        )


def _tokenizer(recipe: Recipe) -> Any:
    """The tokenizer that prompts will be rendered with; None when it has yet to be trained, or no model is named."""
    from slimecli.headers import config_folder
    from slimecli.model_specs import get_spec
    from slimecli.weights.hub import fetch
    from slimecli.weights.source import TOKENIZER_FILES

    section = recipe.model
    folder = config_folder(Path(section.path).expanduser()) if section.path else None
    if folder is None:
        if not section.name or (section.source == "init" and section.tokenizer_vocab):
            return None
        spec = get_spec(section.name)
        if not spec.repo:
            return None
        folder = fetch(spec.repo, revision=section.revision or spec.revision, allow=TOKENIZER_FILES).folder
    return open_tokenizer(folder, trust_remote_code=section.trust_remote_code)


def open_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of an HF folder."""
    from slimecli import env
    from slimecli.errors import DataError

    env.quiet_libraries()
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise DataError(f"no model folder {folder}", "give a local HF folder with --model DIR")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} has no usable tokenizer: {error}", "it needs tokenizer.json") from error
    if not tokenizer.encode("a"):  # transformers makes an empty one of the family where the files are missing
        raise DataError(f"{folder} has no usable tokenizer: no text has tokens", "it needs tokenizer.json")
    return tokenizer


def show_rows(folder: Path, recipe: Recipe, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The first rows of each file; with a tokenizer, every token of a demonstration with its loss mask."""
    from slimecli.data_tools.conversations import load_conversations
    from slimecli.data_tools.formats import read_rows

    shown: list[dict[str, Any]] = []
    for stem in ("train", "holdout", "sft"):
        path = folder / f"{stem}.jsonl"
        if not path.is_file():
            continue
        part = f"{path}@[0:{count}]"
        entries: list[dict[str, Any]] = [{"file": path.name, "row": row} for row in read_rows(part)]
        shown += entries
        if stem == "sft" and tokenizer is not None:
            for entry, sample in zip(entries, load_conversations(part, recipe.data, tokenizer), strict=True):
                mask = [0] * sample.prompt_length + sample.mask
                pairs = zip(sample.tokens, mask, strict=True)
                entry["tokens"] = [[token, tokenizer.decode([token]), trained] for token, trained in pairs]
    return shown


def cli(
    run: RunOpt = "",
    recipe: RecipeOpt = "",
    input_: Annotated[str, typer.Option("--input", metavar="FILE", help="prompt data; the same as data.train")] = "",
    out: OutOpt = "",
    model: ModelOpt = "",
    set_: SetOpt = None,
    show: Annotated[int, typer.Option("--show", min=0, metavar="N", help="print N rows of each file")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="sources, demonstrations and converters")] = False,
    json_: JsonOpt = False,
) -> None:
    """Prepare prompts and demonstrations: validate, de-duplicate, hold out, count."""
    from slimecli import console
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe

    if list_:
        return _list(json_)
    if bool(run) == bool(out):
        raise UsageError("say where the data goes", "--run NAME for a run, or --out DIR for a folder")
    overrides = tuple(set_ or ()) + ((f"data.train={json.dumps(input_)}",) if input_ else ())
    if run:
        folder, resolved = _prepare_for_run(run, recipe, model, overrides)
    else:
        folder, resolved = Path(out), load_recipe(recipe, (*overrides, *([] if recipe else ["steps=0"])), model)
        prepare_data(resolved, folder)
    _tell(folder, resolved, model, show, json_, console)
    return None


def _prepare_for_run(name: str, recipe: str, model: str, overrides: tuple[str, ...]) -> tuple[Path, Recipe]:
    from slimecli import console
    from slimecli.commands._stages import run_and_recipe
    from slimecli.errors import UsageError
    from slimecli.pipeline import PIPELINE
    from slimecli.recipe import load_recipe, recipe_path
    from slimecli.rundir import create_run, run_path
    from slimecli.stage import ensure

    if (run_path(name) / "run.json").is_file():
        if recipe:
            raise UsageError(f"run {name} has its recipe already", f"slime prepare-data --run {name}")
        target, resolved = run_and_recipe(name, overrides)
    else:
        if not recipe and not overrides:
            raise UsageError(f"no run {name}", f"slime prepare-data --recipe quickstart --run {name}")
        resolved = load_recipe(recipe, overrides, model)
        text = recipe_path(recipe).read_text(encoding="utf-8") if recipe else ""
        target = create_run(name, resolved, text)
    with target.lock():
        ensure(
            PIPELINE["data"],
            target,
            resolved,
            lambda: prepare_data(resolved, target.data_dir),
            lambda stage, state, detail: console.say(f"{stage}: {state} ({detail})"),
        )
    return target.data_dir, resolved


def _tell(folder: Path, recipe: Recipe, model: str, show: int, json_: bool, console: Any) -> None:
    from slimecli import files

    report = {k: v for k, v in files.read_json(folder / files.DONE).items() if k not in ("made_by", "files")}
    for stem, rows in report["kept"].items():
        console.say(f"{folder / stem}.jsonl: {rows} rows")
    for reason, rows in report["dropped"].items():
        console.note(f"dropped {rows}: {reason}")
    for line in report["examples"]:
        console.warn(line)
    if not report["length_checked"]:
        console.note("prompt lengths were not measured: there is no tokenizer yet")
    shown = []
    if show:
        places = (Path(model), folder.parent / "model" / "hf")
        place = next((p for p in places if (p / "tokenizer.json").is_file()), None)
        tokenizer = open_tokenizer(place) if place else _tokenizer(recipe)
        if tokenizer is None:
            console.note("give --model DIR to see tokens and loss masks")
        shown = show_rows(folder, recipe, show, tokenizer)
    if json_:
        console.emit({"folder": str(folder), **report, **({"shown": shown} if show else {})})
        return
    for entry in shown:
        console.emit_line(f"{entry['file']}\t{json.dumps(entry['row'], ensure_ascii=False, sort_keys=True)}")
        for token, text, trained in entry.get("tokens", []):
            console.emit_line(f"  {trained}\t{token}\t{text!r}")


def _list(json_: bool) -> None:
    from slimecli import console
    from slimecli.data_tools.converters import CONVERTERS, load_converter
    from slimecli.data_tools.demonstrations import DEMONSTRATIONS, describe
    from slimecli.data_tools.sources import list_tasks

    rows = [{"kind": "source", "name": name, "what": ""} for name in list_tasks()]
    rows += [{"kind": "demonstrations", "name": name, "what": describe(name)} for name in DEMONSTRATIONS]
    rows += [{"kind": "convert", "name": name, "what": load_converter(name).what} for name in CONVERTERS]
    if json_:
        console.emit(rows)
    else:
        console.table(rows, ["kind", "name", "what"])
