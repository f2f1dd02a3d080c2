"""`slime download`: a model or data set from the hub, a mirror or a folder, checked against the registry."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, OutOpt

EXAMPLES = [
    "slime download qwen3-0.6b",
    "slime download Qwen/Qwen3-0.6B --revision main --out ./qwen3-0.6b",
    "slime download openai/gsm8k --dataset",
    "HF_ENDPOINT=https://hf-mirror.com slime download qwen3-0.6b",
]


def download(
    name: str,
    *,
    revision: str = "",
    dataset: bool = False,
    out: str = "",
    allow: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    offline: bool = False,
) -> dict[str, Any]:
    """Fetch and check.

    Args:
        name: registry name, `owner/name` on the hub, or a `file://` folder.
        out: copy into this folder; empty: the shared hub cache.
        allow, ignore: glob patterns of files; a selection that leaves out weights is not checked as a model.

    Returns {"folder", "repo", "model", "checked", "bytes"}.
    """
    from pathlib import Path

    from slimecli.errors import DataError, UsageError
    from slimecli.model_specs import ModelSpec, get_spec, registry
    from slimecli.weights.check import check_folder
    from slimecli.weights.hub import fetch

    spec: ModelSpec | None = None
    repo = name
    by_repo = {s.repo.lower() for s in registry().values() if s.repo}
    if not dataset and ("/" not in name or name.lower() in by_repo):
        spec = get_spec(name)
        repo = spec.repo
        if not repo:
            raise UsageError(f"{spec.name} has no published weights", "use it with --set model.source=init")
        revision = revision or spec.revision
    folder = fetch(
        repo,
        revision=revision,
        kind="dataset" if dataset else "model",
        out=Path(out).expanduser() if out else None,
        allow=allow,
        ignore=ignore,
        offline=offline,
    )
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and ".cache" not in p.relative_to(folder).parts]
    if not found:
        raise DataError(f"{repo} has no file that matches", "check --allow and --ignore")
    checked = None
    if not dataset and not allow:
        checked = check_folder(folder, spec)
    return {
        "folder": str(folder),
        "repo": repo,
        "model": spec.name if spec else (checked.family.model_type if checked else None),
        "checked": checked is not None,
        "bytes": sum(p.stat().st_size for p in found),
    }


def cli(
    name: Annotated[str, typer.Argument(metavar="NAME|OWNER/NAME|file://DIR", help="what to fetch")],
    revision: Annotated[str, typer.Option("--revision", help="branch, tag or commit; default: the registry's")] = "",
    dataset: Annotated[bool, typer.Option("--dataset", help="a data set, not a model")] = False,
    out: OutOpt = "",
    allow: Annotated[list[str] | None, typer.Option("--allow", metavar="GLOB", help="only these files")] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="GLOB", help="not these files")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="use only what is in the cache")] = False,
    json_: JsonOpt = False,
) -> None:
    """Fetch a model or data set into the shared cache (or --out), and check that it is what it says."""
    from slimecli import console

    result = download(
        name,
        revision=revision,
        dataset=dataset,
        out=out,
        allow=tuple(allow or ()),
        ignore=tuple(ignore or ()),
        offline=offline,
    )
    if json_:
        console.emit(result)
        return
    checked = f", checked as {result['model']}" if result["checked"] else ""
    console.say(f"{result['repo']}: {result['bytes'] / 1e9:.3f} GB{checked}")
    console.emit_line(result["folder"])
    if result["checked"]:
        console.hint(f"slime plan --recipe grpo --model {result['folder']}", "what training it would take")
