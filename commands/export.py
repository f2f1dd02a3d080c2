"""`slime export`: the weights of a run as an HF folder that transformers and SGLang load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, OutOpt, RunOpt

if TYPE_CHECKING:
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime export --run quickstart",
    "slime export --run quickstart --step 50 --out ./my-model --dtype bfloat16",
    "slime export --run quickstart --json",
]


def export_checkpoint(run: RunDir, step: int | None, *, out: Path | None = None, dtype: str = "") -> Path:
    """Export one step of a run.

    Args:
        step: None: the newest; 0: the weights before step 1 (after SFT).
        out: None: export/ in the run.
        dtype: empty: export.dtype of the recipe, or model.dtype.

    Returns the committed folder; it was read back and compared before it appeared.
    """
    from slimecli import files
    from slimecli.errors import DataError
    from slimecli.weights.card import model_card
    from slimecli.weights.check import check_folder
    from slimecli.weights.convert import torch_dtype
    from slimecli.weights.fingerprint import fingerprint
    from slimecli.weights.hf import HfFolder, save_hf_folder

    recipe = run.recipe()
    kind = dtype or recipe.export.dtype or recipe.model.dtype
    number, source = find_weights(run, step)
    final = out or run.export_dir
    notes: dict[str, Any] = {"run": str(run.root), "step": number}
    with files.committed_folder(final, notes) as folder:
        shards = recipe.export.max_shard_bytes
        pairs = HfFolder(source).iterate()
        notes |= save_hf_folder(pairs, folder, like=source, dtype=torch_dtype(kind), max_shard_bytes=shards)
        files.write_text(folder / "README.md", model_card(run, recipe, number, notes))
        check_folder(folder)
        found = fingerprint(HfFolder(folder).iterate())
        if found != notes["fingerprint"]:
            raise DataError(f"{final} reads back as {found}, written as {notes['fingerprint']}", "check the disk")
    return final


def find_weights(run: RunDir, step: int | None) -> tuple[int, Path]:
    """(step, HF folder) to export; raises MissingStageError naming the steps there are."""
    from slimecli import files
    from slimecli.errors import MissingStageError
    from slimecli.session import start_weights

    recipe, steps = run.recipe(), [s for s in run.checkpoints() if files.is_committed(run.weights_dir(s))]
    trained = bool(recipe.sft.steps)
    if step is None and not steps and not trained:
        raise MissingStageError(f"run {run.name} has trained nothing yet", f"slime run --resume --run {run.root}")
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


def cli(
    run: RunOpt,
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    out: OutOpt = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16; default: the recipe's")] = "",
    json_: JsonOpt = False,
) -> None:
    """Write a run's weights as an HF folder with tokenizer, chat template and model card."""
    from slimecli import console, files
    from slimecli.rundir import open_run

    target = open_run(run)
    with target.lock():
        folder = export_checkpoint(target, step, out=Path(out).expanduser() if out else None, dtype=dtype)
    done = files.read_json(folder / files.DONE)
    if json_:
        console.emit({**done, "folder": str(folder)})
        return
    console.say(f"step {done['step']}: {done['tensors']} tensors, {done['bytes'] / 1e6:.2f} MB in {done['dtype']}")
    console.emit_line(str(folder))
    console.hint(f"slime serve --model {folder}", "talk to it")
