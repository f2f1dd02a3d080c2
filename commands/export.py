"""`slime export`: the weights of a run or a checkpoint as an HF folder that transformers and SGLang load."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, OutOpt

if TYPE_CHECKING:
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime export --run quickstart",
    "slime export --run quickstart --step 50 --out ./my-model --dtype bfloat16",
    "slime export --run quickstart --out ./my-model --push my-name/my-model --private",
    "slime export --from ./my-model-megatron --out ./my-model --max-shard-size 2GB",
    "slime export --from ./my-model --out ./my-model-fp8 --quantize fp8",
    "slime export --run quickstart --json",
]


def export_checkpoint(
    run: RunDir,
    step: int | None,
    *,
    out: Path | None = None,
    dtype: str = "",
    quantize: str = "",
    max_shard_bytes: int = 0,
    overwrite: bool = False,
) -> Path:
    """Export one step of a run.

    Args:
        step: None: the newest; 0: the weights before step 1 (after SFT).
        out: None: export/ in the run, which is replaced.
        dtype: empty: export.dtype of the recipe, or model.dtype.
        quantize: `fp8`, `fp8-ue8m0`, or empty.
        max_shard_bytes: 0: the recipe's.
        overwrite: replace an earlier export at `out`.

    Returns the committed folder; it was read back and compared before it appeared.
    """
    from slimecli.weights.card import model_card
    from slimecli.weights.export import export_weights
    from slimecli.weights.origin import hf_origin

    recipe = run.recipe()
    number, source = find_weights(run, step)
    final = out or run.export_dir
    options = {"dtype": dtype, "quantize": quantize, "max-shard-size": max_shard_bytes, "out": out}
    command = command_line({"run": run.name, "step": number, **options})
    export_weights(
        hf_origin(source, kind="run", facts={"run": str(run.root), "step": number}),
        final,
        dtype=dtype or recipe.export.dtype or recipe.model.dtype,
        quantize=quantize,
        max_shard_bytes=max_shard_bytes or recipe.export.max_shard_bytes,
        overwrite=overwrite or out is None,
        card=lambda notes: model_card(run, recipe, number, notes, command),
    )
    return final


def export_folder(
    source: Path,
    out: Path,
    *,
    dtype: str = "",
    quantize: str = "",
    max_shard_bytes: int = 0,
    overwrite: bool = False,
) -> Path:
    """Export an HF folder, a trainer checkpoint or a torch_dist checkpoint.

    Args:
        dtype: empty: as in the source; for a trainer checkpoint that of the run's recipe.

    Returns the committed folder; it was read back and compared before it appeared.
    """
    from slimecli.weights.card import folder_card
    from slimecli.weights.export import SHARD_BYTES, export_weights
    from slimecli.weights.origin import find_origin

    options = {"dtype": dtype, "quantize": quantize, "max-shard-size": max_shard_bytes, "out": out}
    command = command_line({"from": source, **options})
    export_weights(
        find_origin(source),
        out,
        dtype=dtype,
        quantize=quantize,
        max_shard_bytes=max_shard_bytes or SHARD_BYTES,
        overwrite=overwrite,
        card=lambda notes: folder_card(notes, command),
    )
    return out


def find_weights(run: RunDir, step: int | None) -> tuple[int, Path]:
    """(step, HF folder) to export; raises MissingStageError naming the steps there are."""
    from slimecli import files
    from slimecli.errors import MissingStageError
    from slimecli.rundir import RunDir
    from slimecli.session import start_weights

    recipe, steps = run.recipe(), [s for s in run.checkpoints() if files.is_committed(run.weights_dir(s))]
    trained = bool(recipe.sft.steps) and files.is_committed(RunDir(run.sft_dir).weights_dir(recipe.sft.steps))
    if step is None and not steps and not trained:
        raise MissingStageError(f"run {run.name} has trained nothing yet", f"slime run --resume --run {run.quoted}")
    number = step if step is not None else (steps[-1] if steps else 0)
    if number == 0:
        return 0, start_weights(run, recipe)
    if number not in steps:
        there = ", ".join(map(str, [*([0] if trained else []), *steps])) or "none"
        raise MissingStageError(
            f"run {run.name} has no weights of step {number}; there are: {there}",
            "name one of these steps; checkpoint.keep says how many are kept",
        )
    return number, run.weights_dir(number)


def command_line(options: dict[str, Any]) -> str:
    """The `slime export` that these options stand for, for a card: empty ones and parent folders are left out."""
    named = {k: v.name if isinstance(v, Path) else v for k, v in options.items()}
    given = [(k, v) for k, v in named.items() if v is not None and v != "" and (v or k == "step")]
    return shlex.join(["slime", "export", *(word for key, value in given for word in (f"--{key}", str(value)))])


def cli(
    what: Annotated[
        str,
        typer.Option("--run", "-r", "--from", metavar="NAME|DIR", help="run, its checkpoint, HF or torch_dist folder"),
    ] = "",
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    out: OutOpt = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16; default: the recipe's")] = "",
    quantize: Annotated[str, typer.Option("--quantize", metavar="fp8|fp8-ue8m0", help="linear layers in fp8")] = "",
    shard: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="e.g. 2GB; default: 5GB")] = "",
    push: Annotated[str, typer.Option("--push", metavar="OWNER/NAME", help="upload to this hub repository")] = "",
    private: Annotated[bool, typer.Option("--private", help="a repository that --push makes is private")] = False,
    json_: JsonOpt = False,
) -> None:
    """Write weights as an HF folder with tokenizer, chat template and model card; upload it if asked to."""
    from slimecli import console, files
    from slimecli.errors import UsageError
    from slimecli.weights.export import is_export, parse_bytes

    if not what:
        raise UsageError("what is to be exported?", "say --run NAME, or --from DIR; `slime runs` lists runs")
    if private and not push:
        raise UsageError("--private is of the repository that --push makes", "say --push OWNER/NAME, or leave it out")
    given, target = Path(what).expanduser(), Path(out).expanduser() if out else None
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize}
    options["max_shard_bytes"] = parse_bytes(shard) if shard else 0
    user = _pushing_user(push)
    if push and target is None and is_export(given):
        if any(options.values()):
            raise UsageError(f"{what} is exported already and is pushed as it is", "make another one with --out DIR")
        folder = given
    else:
        folder = _export(given, what, step, target, options)
    done = files.read_json(folder / files.DONE)
    result = {**done, "folder": str(folder)}
    if not json_:
        told = f"step {done['step']}" if "step" in done else done["from"]
        kind = done["quantized"] or done["dtype"]
        console.say(f"{told}: {done['tensors']} tensors, {done['bytes'] / 1e6:.2f} MB in {kind}")
    if push:
        result |= {"pushed": _push(folder, push, private=private, user=user)}
    if json_:
        console.emit(result)
        return
    console.emit_line(str(folder))
    console.hint(f"slime serve --model {folder}", "talk to it")


def _export(given: Path, what: str, step: int | None, out: Path | None, options: dict[str, Any]) -> Path:
    """A folder that holds weights, or else a run."""
    from slimecli.errors import UsageError
    from slimecli.rundir import open_run, run_path

    is_folder = given.is_dir() and not (given / "run.json").is_file() and not (run_path(what) / "run.json").is_file()
    if is_folder and step is not None:
        raise UsageError("--step names a step of a run", "say --run NAME, or --from runs/NAME/checkpoints/step_N")
    if is_folder and out is None:
        raise UsageError("where does the result go?", "--out DIR")
    if is_folder:
        assert out is not None
        return export_folder(given, out, **options)
    run = open_run(what)
    with run.lock():
        return export_checkpoint(run, step, out=out, **options)


def _pushing_user(push: str) -> str:
    """Who pushes, asked before the work begins; empty when nothing is pushed."""
    if not push:
        return ""
    from slimecli.weights.push import check_access

    return check_access(push)


def _push(folder: Path, repo: str, *, private: bool, user: str) -> dict[str, Any]:
    from slimecli import console
    from slimecli.errors import SlimeError
    from slimecli.weights.push import push_folder

    console.say(f"pushing to {repo} as {user}")
    try:
        return push_folder(folder, repo, private=private)
    except SlimeError:
        console.hint(f"slime export --from {folder} --push {repo}", "push again without exporting again")
        raise
