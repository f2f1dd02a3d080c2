"""`slime convert`: HF safetensors <-> Megatron torch_dist, streamed, verified, without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, OutOpt

if TYPE_CHECKING:
    from slimecli.model_specs import ModelSpec

EXAMPLES = [
    "slime convert --model qwen3-0.6b --to torch_dist --out ./qwen3-0.6b-megatron",
    "slime convert --hf ./my-model --to torch_dist --out ./my-model-megatron --dtype bfloat16",
    "slime convert --from ./my-model-megatron --to hf --out ./my-model-again",
    "slime convert --from ./my-model-megatron --to hf --out ./my-model-fp8 --quantize fp8",
    "slime convert --model qwen3-4b --to torch_dist --dry-run",
]

KINDS = ("torch_dist", "hf")


def convert(
    *,
    to: str,
    out: str,
    model: Sequence[str] = (),
    source: str = "",
    dtype: str = "",
    quantize: str = "",
    verify: bool = True,
    jobs: int = 0,
) -> dict[str, Any]:
    """Convert, re-read, compare, commit. What an interrupted conversion has done is used.

    Args:
        to: `torch_dist` or `hf`.
        model: registry name, HF folder, or both. The folder (without one, the name's, fetched if need be) is the source
            to torch_dist, and gives config and tokenizer to hf; the name is what its config must agree with.
        source: torch_dist checkpoint (to hf).
        dtype: of the result; empty: as in the source.
        quantize: `fp8` or `fp8-ue8m0` (to hf); empty: none.
        verify: re-read the result and compare before it appears.
        jobs: threads; 0: one more than the cores this process may use (`taskset` sets them), up to 8.

    Returns what DONE.json holds, and the folder.
    """
    from slimecli.errors import UsageError
    from slimecli.headers import is_torch_dist
    from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf, torch_dtype
    from slimecli.weights.source import resolve_model_dir

    check_usage(to, model, source, quantize)
    if not out:
        raise UsageError("where does the result go?", "--out DIR")
    folder, kind = Path(out).expanduser(), torch_dtype(dtype)
    path, spec = named(model)
    if to == "torch_dist":
        hf = path or resolve_model_dir(model[0])
        if is_torch_dist(hf):
            raise UsageError(f"{hf} is a torch_dist checkpoint already", f"--from {shlex.quote(str(hf))} --to hf")
        notes = hf_to_torch_dist(hf, folder, expected=spec, dtype=kind, verify=verify, jobs=jobs)
    else:
        checkpoint = Path(source).expanduser()
        notes = torch_dist_to_hf(
            checkpoint, folder, like=path, expected=spec, dtype=kind, quantize=quantize, verify=verify, jobs=jobs
        )
    return {**notes, "folder": str(folder)}


def dry_run(
    *, to: str, model: Sequence[str] = (), source: str = "", dtype: str = "", quantize: str = "", verify: bool = True
) -> dict[str, Any]:
    """What convert would do: the mapping table, the files, bytes, memory and time. A registry name needs no weights."""
    from slimecli.weights.check import check_folder, spec_of
    from slimecli.weights.convert import find_companions, open_checkpoint, torch_dtype
    from slimecli.weights.maps import rules_of
    from slimecli.weights.pieces import Source, source_of
    from slimecli.weights.preview import preview
    from slimecli.weights.quant import open_weights
    from slimecli.weights.torch_dist import TorchDistSource

    path, spec = named(model)
    check_usage(to, model, source, quantize, planned=spec is not None and path is None)
    opened: Source | None = None
    if to == "torch_dist" and path is not None:
        folder = open_weights(path)
        spec = check_folder(path, spec) or spec_of(folder)
        rules, opened = rules_of(spec, spec.padded_vocab(), folder.shapes), source_of(folder)
    elif source:
        checkpoint = Path(source).expanduser()
        stored, spec, rules = open_checkpoint(checkpoint, path or find_companions(checkpoint), spec)
        opened = TorchDistSource(stored, rules)
    else:
        assert spec is not None
        rules = rules_of(spec, spec.padded_vocab() if to == "torch_dist" else 0)
    try:
        return preview(spec, to, rules, source=opened, dtype=torch_dtype(dtype), quantize=quantize, verify=verify)
    finally:
        if opened is not None:
            opened.close()


def named(model: Sequence[str]) -> tuple[Path | None, ModelSpec | None]:
    """The HF folder and the registry entry among what was given, each at most once."""
    from slimecli.errors import UsageError
    from slimecli.model_specs import get_spec

    folders = [m for m in model if m.startswith((".", "/", "~")) or Path(m).exists()]
    names = [m for m in model if m not in folders]
    if len(folders) > 1 or len(names) > 1:
        raise UsageError(f"which of {' and '.join(model)}?", "give one registry name, one HF folder, or one of each")
    return Path(folders[0]).expanduser() if folders else None, get_spec(names[0]) if names else None


def check_usage(to: str, model: Sequence[str], source: str, quantize: str, *, planned: bool = False) -> None:
    """Refuse contradictory or incomplete arguments.

    Args:
        planned: nothing is read but a registry entry.
    """
    from slimecli.errors import UsageError, nearest

    if to not in KINDS:
        raise UsageError(f"--to {to!r}{nearest(to, list(KINDS))}", "say --to torch_dist or --to hf")
    if to == "torch_dist" and quantize:
        raise UsageError("Megatron's checkpoints are not quantised", "leave out --quantize, or say --to hf")
    if to == "torch_dist" and source:
        raise UsageError("--from names a torch_dist checkpoint, the source of --to hf", "leave it out, or say --to hf")
    if to == "torch_dist" and not model:
        raise UsageError("which model?", "say --model NAME or --hf DIR")
    if to == "hf" and not source and not planned:
        raise UsageError("which checkpoint?", "say --from DIR, the folder that Megatron saved into")


def cli(
    to: Annotated[str, typer.Option("--to", metavar="torch_dist|hf", help="format of the result")],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "--hf", metavar="NAME|DIR", help="registry name, local HF folder, or one of each"),
    ] = None,
    source: Annotated[str, typer.Option("--from", metavar="DIR", help="torch_dist checkpoint, for --to hf")] = "",
    out: OutOpt = "",
    dtype: Annotated[str, typer.Option("--dtype", help="dtype of the result; default: as in the source")] = "",
    quantize: Annotated[
        str, typer.Option("--quantize", metavar="fp8|fp8-ue8m0", help="linear layers, for --to hf")
    ] = "",
    verify: Annotated[bool, typer.Option(help="read the result back and compare before it appears")] = True,
    plan_only: Annotated[bool, typer.Option("--dry-run", help="print files, bytes and the mapping table only")] = False,
    json_: JsonOpt = False,
) -> None:
    """Convert a model between Hugging Face and Megatron; the result carries a certificate. Run again, it continues."""
    from slimecli import console

    if plan_only:
        plan = dry_run(to=to, model=model or (), source=source, dtype=dtype, quantize=quantize, verify=verify)
        if json_:
            console.emit(plan)
            return
        gb = plan["bytes_written"] / 1e9
        console.say(f"{plan['model']} -> {to}: {len(plan['tensors'])} parts, {len(plan['files'])} file(s), {gb:.3f} GB")
        memory, seconds = plan["memory_bytes"] / 1e9, plan["seconds_at_1_gb_per_s"]
        console.say(f"{plan['jobs']} threads, {memory:.2f} GB of memory; {seconds:.0f} s on a disk of 1 GB/s")
        console.note("threads follow the cores that may be used: taskset -c 0,1 slime convert ... for two")
        console.table(plan["tensors"], ["hf", "megatron", "offset", "shape", "dtype"])
        return
    result = convert(to=to, out=out, model=model or (), source=source, dtype=dtype, quantize=quantize, verify=verify)
    if json_:
        console.emit(result)
        return
    proof = "verified, see certificate.json" if result["verified"] else "NOT verified"
    console.say(f"{result['tensors']} tensors, {result['bytes'] / 1e9:.3f} GB in {result['seconds']:.1f} s: {proof}")
    console.emit_line(result["folder"])
