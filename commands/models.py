"""`slime models`: what slime knows about models, and everything that follows from their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt

if TYPE_CHECKING:
    from slimecli.model_specs import ModelSpec

EXAMPLES = [
    "slime models",
    "slime models --filter qwen3",
    "slime models show qwen3-4b",
    "slime models show qwen3-4b --json",
]

COLUMNS = ["name", "family", "params", "layers", "hidden", "heads", "kv", "head", "vocab", "context", "repo"]


def list_models(text: str = "") -> list[ModelSpec]:
    """Registry entries whose name, family or repository contains `text`, by family and size."""
    from slimecli.model_specs import registry

    found = [s for s in registry().values() if text.lower() in f"{s.name} {s.family.model_type} {s.repo}".lower()]
    return sorted(found, key=lambda s: (s.family.model_type, s.params, s.name))


def show_model(name: str) -> ModelSpec:
    """One entry by name or repository, or the spec of a local HF folder."""
    from pathlib import Path

    from slimecli import files
    from slimecli.model_specs import from_config, get_spec

    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return from_config(files.read_json(path / "config.json"), name=path.resolve().name)
    return get_spec(name)


def cli(
    action: Annotated[str, typer.Argument(metavar="[show]", help="what to do; nothing: list")] = "",
    name: Annotated[str, typer.Argument(metavar="[NAME|DIR]", help="registry name, repository or HF folder")] = "",
    filter_: Annotated[str, typer.Option("--filter", metavar="TEXT", help="only models that contain this")] = "",
    json_: JsonOpt = False,
) -> None:
    """List known models, or show one with its memory, FLOPs and Megatron arguments."""
    from slimecli import console
    from slimecli.errors import UsageError

    if action not in ("", "show") or bool(action) != bool(name):
        raise UsageError(
            f"`slime models {action} {name}`".rstrip() + " is not understood", "slime models show qwen3-4b"
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
        "layers": spec.layers,
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv": spec.kv_heads,
        "head": spec.head_dim,
        "vocab": spec.vocab,
        "context": spec.max_positions,
        "repo": spec.repo or "(new weights only)",
    }


def describe(spec: ModelSpec) -> list[dict[str, Any]]:
    """Everything about one model as rows of (what, value)."""
    scaling = spec.rope_scaling
    sizes = {d: f"{spec.weight_bytes(d) / 1e9:,.3f} GB" for d in ("float32", "bfloat16", "float8")}
    pairs: list[tuple[str, Any]] = [
        ("family", f"{spec.family.model_type} ({spec.family.architecture})"),
        ("repository", spec.repo or "-"),
        ("layers", spec.layers),
        ("hidden / ffn", f"{spec.hidden} / {spec.ffn}"),
        ("heads / kv heads / head dim", f"{spec.heads} / {spec.kv_heads} / {spec.head_dim}"),
        ("vocabulary", spec.vocab),
        ("output layer", "the embedding (tied)" if spec.tied else "its own"),
        ("q, k norm / qkv bias", f"{spec.qk_norm or 'no'} / {_yes(spec.qkv_bias)}"),
        ("rotary base", f"{spec.rope_theta:g}"),
        ("rotary scaling", f"{scaling.rope_type}, factor {scaling.factor:g}" if scaling else "none"),
        ("norm epsilon", f"{spec.eps:g}"),
        ("context", f"{spec.max_positions} tokens"),
        ("parameters", f"{spec.params:,} ({spec.active_params:,} active per token)"),
        ("weights", ", ".join(f"{size} in {dtype}" for dtype, size in sizes.items())),
        ("KV cache", f"{spec.kv_bytes_per_token():,} bytes per token in bfloat16"),
        ("forward", f"{spec.flops_per_token(0) / 1e9:,.3f} GFLOP per token, without attention to the context"),
        ("forward at 4096 tokens", f"{spec.flops_per_token(4096) / 1e9:,.3f} GFLOP per token"),
        ("Megatron arguments", megatron_line(spec)),
        ("source", spec.source),
    ]
    return [{"what": what, "value": value} for what, value in pairs]


def megatron_line(spec: ModelSpec) -> str:
    """The arguments as Megatron's command line takes them."""
    return " ".join(f"--{k}" if v is True else f"--{k} {v}" for k, v in spec.megatron_args().items())


def billions(count: int) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
