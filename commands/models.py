"""`slime models`: what slime knows about models, and everything that follows from their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt

if TYPE_CHECKING:
    from slimecli.model_specs import ModelSpec

EXAMPLES = [
    "slime models",
    "slime models qwen3",
    "slime models --filter moe --json",
    "slime models show qwen3-4b",
    "slime models show deepseek-v3 --json",
]

COLUMNS = [
    "name",
    "family",
    "params",
    "active",
    "layers",
    "hidden",
    "heads",
    "kv",
    "head",
    "experts",
    "vocab",
    "context",
    "repo",
]


def list_models(text: str = "") -> list[ModelSpec]:
    """Registry entries whose name, family or repository contains `text`, by family and size."""
    from slimecli.model_specs import registry

    found = [s for s in registry().values() if text.lower() in f"{s.name} {s.family.model_type} {s.repo}".lower()]
    return sorted(found, key=lambda s: (s.family.model_type, s.params, s.name))


def show_model(name: str) -> ModelSpec:
    """One entry by name or repository, or the spec of a local HF folder."""
    from pathlib import Path

    from slimecli import files
    from slimecli.errors import DataError
    from slimecli.model_specs import from_config, get_spec

    path = Path(name).expanduser()
    path = path.parent if path.name == "config.json" else path
    if (path / "config.json").is_file():
        return from_config(files.read_json(path / "config.json"), name=path.resolve().name)
    if path.is_dir() and name.startswith((".", "/", "~")):
        raise DataError(f"{path} has no config.json", "name an HF model folder")
    return get_spec(name)


def cli(
    action: Annotated[
        str, typer.Argument(metavar="[show|TEXT]", help="show one, or list those that contain TEXT")
    ] = "",
    name: Annotated[str, typer.Argument(metavar="[NAME|DIR]", help="registry name, repository or HF folder")] = "",
    filter_: Annotated[str, typer.Option("--filter", metavar="TEXT", help="only models that contain this")] = "",
    json_: JsonOpt = False,
) -> None:
    """List known models, or show one with its memory, FLOPs and Megatron arguments."""
    from slimecli import console
    from slimecli.errors import UsageError

    if action != "show" and not name and not filter_:
        filter_, action = action, ""
    if action not in ("", "show") or bool(action) != bool(name):
        raise UsageError(
            f"`slime models {' '.join(filter(None, (action, name)))}` is not understood", "slime models show qwen3-4b"
        )
    if action == "show":
        spec = show_model(name)
        if json_:
            console.emit(spec.to_dict())
        else:
            console.table(describe(spec), ["what", "value"], title=spec.name)
            if spec.note:
                console.note(spec.note)
        return
    specs = list_models(filter_)
    if not specs:
        raise UsageError(f"no model contains {filter_!r}", "`slime models` lists all")
    if json_:
        console.emit([s.to_dict() for s in specs])
    else:
        console.table([row(s) for s in specs], COLUMNS)


def row(spec: ModelSpec) -> dict[str, Any]:
    """One line of the list."""
    return {
        "name": spec.name,
        "family": spec.family.model_type,
        "params": billions(spec.params),
        "active": billions(spec.active_params),
        "layers": spec.layers,
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv": "latent" if spec.mla else spec.kv_heads,
        "head": spec.mla.qk_dim if spec.mla else spec.head_dim,
        "experts": f"{spec.moe.experts}/{spec.moe.top_k}" if spec.moe else "-",
        "vocab": spec.vocab,
        "context": spec.max_positions,
        "repo": spec.repo or "(new weights only)",
    }


def describe(spec: ModelSpec) -> list[dict[str, Any]]:
    """Everything about one model as rows of (what, value)."""
    from slimecli.model_specs.megatron import command_line

    pairs = [
        ("family", f"{spec.family.model_type} ({spec.family.architecture})"),
        ("repository", spec.repo or "-"),
        ("layers", spec.layers),
        ("hidden / ffn", f"{spec.hidden} / {spec.ffn if spec.dense_layers else 'experts only'}"),
        *_attention_rows(spec),
        *_expert_rows(spec),
        ("vocabulary", spec.vocab),
        ("output layer", "the embedding (tied)" if spec.tied else "its own"),
        ("norm epsilon", f"{spec.eps:g}{', weights stored less one' if spec.unit_norms else ''}"),
        ("context", f"{spec.max_positions} tokens"),
        *_size_rows(spec),
        ("Megatron arguments", command_line(spec)),
        ("source", spec.source),
    ]
    return [{"what": what, "value": value} for what, value in pairs]


def _attention_rows(spec: ModelSpec) -> list[tuple[str, Any]]:
    mla, linear, index, scaling = spec.mla, spec.linear, spec.indexer, spec.rope_scaling
    rows: list[tuple[str, Any]] = []
    if mla:
        ranks = f"{mla.q_rank or 'none'} / {mla.kv_rank}"
        rows.append(("latent attention: heads, query / key-value rank", f"{spec.heads}, {ranks}"))
        rows.append(("per head: plain / rotary / value", f"{mla.nope_dim} / {mla.rope_dim} / {mla.v_dim}"))
    else:
        rows.append(("heads / kv heads / head dim", f"{spec.heads} / {spec.kv_heads} / {spec.head_dim}"))
        rows.append(("q, k norm / qkv bias", f"{spec.qk_norm or 'no'} / {'yes' if spec.qkv_bias else 'no'}"))
    if spec.gated:
        rows.append(("attention output", "gated, by half of q_proj"))
    if spec.sandwich:
        rows.append(("norms", "also after attention and after the MLP"))
    if linear:
        heads = (
            f"{linear.key_heads} key and {linear.value_heads} value heads of {linear.key_dim} and {linear.value_dim}"
        )
        rows.append(("gated delta", f"all but each {linear.full_every}th layer: {heads}, convolution {linear.conv}"))
    if index:
        shared = f", in each {index.every}th layer" if index.every > 1 else ""
        rows.append(("indexer", f"{index.heads} heads of {index.head_dim}, top {index.top_k}{shared}"))
    style = ", neighbouring pairs" if spec.interleaved else ""
    rows.append(("rotary base", f"{spec.rope_theta:g}, over {spec.rotary:.0%} of the head{style}"))
    rows.append(("rotary scaling", f"{scaling.rope_type}, factor {scaling.factor:g}" if scaling else "none"))
    return rows


def _expert_rows(spec: ModelSpec) -> list[tuple[str, Any]]:
    moe = spec.moe
    if moe is None:
        return []
    groups = f", from {moe.top_groups} of {moe.groups} groups" if moe.groups > 1 else ""
    rows = [
        ("experts", f"{moe.experts} of width {moe.ffn}, {moe.top_k} per token{groups}"),
        ("router", f"{moe.score}{', normalized' if moe.normalize else ''}, x {moe.scale:g}"),
    ]
    if moe.shared_ffn:
        rows.append(("shared expert", f"width {moe.shared_ffn}{', gated' if moe.shared_gate else ''}"))
    if moe.dense_layers:
        rows.append(("dense layers", f"the first {moe.dense_layers}"))
    return rows


def _size_rows(spec: ModelSpec) -> list[tuple[str, Any]]:
    sizes = ", ".join(f"{spec.weight_bytes(d) / 1e9:,.3f} GB in {d}" for d in ("float32", "bfloat16", "float8"))
    rows = [("parameters", f"{spec.params:,} ({spec.active_params:,} active per token)")]
    if spec.mtp:
        rows.append(("prediction layers", f"{spec.mtp}, with {spec.mtp_params:,} parameters more"))
    rows += [
        ("weights", sizes),
        ("KV cache", f"{spec.kv_bytes_per_token():,} bytes per token in bfloat16"),
    ]
    if spec.linear:
        rows.append(("state of gated delta", f"{spec.state_bytes():,} bytes per sequence, whatever its length"))
    rows += [
        ("forward", f"{spec.flops_per_token(0) / 1e9:,.3f} GFLOP per token, without attention to the context"),
        ("forward at 4096 tokens", f"{spec.flops_per_token(4096) / 1e9:,.3f} GFLOP per token"),
    ]
    return rows


def billions(count: int) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
