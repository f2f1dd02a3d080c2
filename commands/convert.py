"""`slime convert`: HF safetensors <-> Megatron torch_dist, streamed, verified, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, ModelOpt, OutOpt

EXAMPLES = [
    "slime convert --model qwen3-0.6b --to torch_dist --out ./qwen3-0.6b-megatron",
    "slime convert --hf ./my-model --to torch_dist --out ./my-model-megatron --dtype bfloat16",
    "slime convert --from ./my-model-megatron --to hf --out ./my-model-again",
    "slime convert --model qwen3-4b --to torch_dist --dry-run",
]

KINDS = ("torch_dist", "hf")


def convert(
    *,
    to: str,
    out: str,
    model: str = "",
    hf: str = "",
    source: str = "",
    dtype: str = "",
    verify: bool = True,
) -> dict[str, Any]:
    """Convert, re-read, compare, commit.

    Args:
        to: `torch_dist` or `hf`.
        model: registry name: fetched if need be, and what the config must agree with.
        hf: HF folder: the source (to torch_dist), or config and tokenizer for the result (to hf).
        source: torch_dist checkpoint (to hf).
        dtype: of the result; empty: as in the source.

    Returns what DONE.json holds, and the folder.
    """
    from slimecli.errors import UsageError
    from slimecli.model_specs import get_spec
    from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf, torch_dtype

    check_usage(to, model, hf, source)
    if not out:
        raise UsageError("where does the result go?", "--out DIR")
    folder, kind = Path(out).expanduser(), torch_dtype(dtype)
    spec = get_spec(model) if model and not Path(model).expanduser().exists() else None
    if to == "torch_dist":
        notes = hf_to_torch_dist(hf_source(model, hf), folder, expected=spec, dtype=kind, verify=verify)
    else:
        like = Path(hf or model).expanduser() if hf or (model and spec is None) else None
        checkpoint = Path(source).expanduser()
        notes = torch_dist_to_hf(checkpoint, folder, like=like, expected=spec, dtype=kind, verify=verify)
    return {**notes, "folder": str(folder)}


def dry_run(*, to: str, model: str = "", hf: str = "", source: str = "") -> dict[str, Any]:
    """What convert would do: the mapping table and the bytes. A registry name alone needs no weights here."""
    from slimecli.model_specs import get_spec
    from slimecli.weights.check import check_folder, spec_of
    from slimecli.weights.convert import find_companions, plan_rows
    from slimecli.weights.hf import HfFolder

    check_usage(to, model, hf, source)
    path = Path(hf or model).expanduser()
    if to == "torch_dist" and path.is_dir():
        opened = HfFolder(path)
        spec = check_folder(path) or spec_of(opened)
        rows = plan_rows(spec, opened, spec.padded_vocab())
        return {"model": spec.name, "to": to, "bytes": opened.nbytes, "tensors": rows}
    if model and not path.is_dir():
        spec = get_spec(model)
    else:
        from slimecli import files
        from slimecli.model_specs import from_config

        like = path if path.is_dir() and (hf or model) else find_companions(Path(source).expanduser())
        spec = from_config(files.read_json(like / "config.json"), name=like.name)
    return {
        "model": spec.name,
        "to": to,
        "bytes": spec.weight_bytes(),
        "tensors": plan_rows(spec, None, spec.padded_vocab()),
    }


def check_usage(to: str, model: str, hf: str, source: str) -> None:
    """Refuse contradictory or incomplete arguments."""
    from slimecli.errors import UsageError, nearest

    if to not in KINDS:
        raise UsageError(f"--to {to!r}{nearest(to, list(KINDS))}", "say --to torch_dist or --to hf")
    if to == "torch_dist" and bool(model) == bool(hf):
        raise UsageError("which model?", "say either --model NAME or --hf DIR")
    if to == "torch_dist" and source:
        raise UsageError("--from names a torch_dist checkpoint, the source of --to hf", "leave it out, or say --to hf")
    if to == "hf" and not source and not model:
        raise UsageError("which checkpoint?", "say --from DIR, the folder that Megatron saved into")


def hf_source(model: str, hf: str) -> Path:
    """The HF folder to convert from."""
    from slimecli.weights.source import resolve_model_dir

    return Path(hf).expanduser() if hf else resolve_model_dir(model)


def cli(
    to: Annotated[str, typer.Option("--to", metavar="torch_dist|hf", help="format of the result")],
    model: ModelOpt = "",
    hf: Annotated[str, typer.Option("--hf", metavar="DIR", help="HF folder: weights, or config for --to hf")] = "",
    source: Annotated[str, typer.Option("--from", metavar="DIR", help="torch_dist checkpoint, for --to hf")] = "",
    out: OutOpt = "",
    dtype: Annotated[str, typer.Option("--dtype", help="dtype of the result; default: as in the source")] = "",
    verify: Annotated[bool, typer.Option(help="read the result back and compare before it appears")] = True,
    plan_only: Annotated[bool, typer.Option("--dry-run", help="print bytes and the mapping table only")] = False,
    json_: JsonOpt = False,
) -> None:
    """Convert a model between Hugging Face and Megatron; the result carries a certificate."""
    from slimecli import console

    if plan_only:
        plan = dry_run(to=to, model=model, hf=hf, source=source)
        if json_:
            console.emit(plan)
            return
        console.say(f"{plan['model']} -> {to}: {len(plan['tensors'])} chunks, {plan['bytes'] / 1e9:.3f} GB")
        console.table(plan["tensors"], ["hf", "megatron", "offset", "shape"])
        return
    result = convert(to=to, out=out, model=model, hf=hf, source=source, dtype=dtype, verify=verify)
    if json_:
        console.emit(result)
        return
    proof = "verified, see certificate.json" if result["verified"] else "NOT verified"
    console.say(f"{result['tensors']} tensors in {result['seconds']:.1f} s: {proof}")
    console.emit_line(result["folder"])
