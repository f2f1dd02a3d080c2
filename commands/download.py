"""`slime download`: a model or data set from the hub, a mirror or a folder, checked against the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, OutOpt

if TYPE_CHECKING:
    from slimecli.weights.hub import Fetched

EXAMPLES = [
    "slime download qwen3-0.6b",
    "slime download Qwen/Qwen3-0.6B --revision main --out ./qwen3-0.6b",
    "slime download openai/gsm8k --dataset",
    "slime download qwen3-0.6b --endpoint https://hf-mirror.com",
    "slime download qwen3-0.6b --offline --json",
]

LEFT = {
    "pickled": "pickled files are not fetched, as loading one may run code",
    "code": "Python files are not fetched; --allow '*.py' fetches them",
    "copy": "a second copy of the same weights is not fetched",
}
"""why files that one may look for did not come"""


def download(
    name: str,
    *,
    revision: str = "",
    dataset: bool = False,
    out: str = "",
    allow: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    offline: bool = False,
    endpoint: str = "",
) -> dict[str, Any]:
    """Fetch and check; every file is hashed, also those that were there before.

    Args:
        name: registry name, `owner/name` on the hub, or a `file://` folder.
        out: copy into this folder; empty: the shared hub cache.
        allow, ignore: glob patterns of files; a selection that leaves out weights is not checked as a model.

    Returns {"folder", "repo", "revision", "commit", "source", "files", "bytes", "fetched_bytes", "left", "model",
    "checked"}: `files` maps names to bytes, `left` reasons to names, `source` is hub, cache or folder.
    """
    from pathlib import Path

    from slimecli.model_specs import ModelSpec, get_spec, registry
    from slimecli.weights.hub import Access, fetch

    how: dict[str, Any] = {
        "out": Path(out).expanduser() if out else None,
        "ignore": ignore,
        "access": Access(endpoint, offline, verify=True),
    }
    spec: ModelSpec | None = None
    by_repo = {s.repo.lower() for s in registry().values() if s.repo}
    if not dataset and ("/" not in name or name.lower() in by_repo):
        from slimecli.weights.source import fetch_spec  # imports torch, which data sets do without

        spec = get_spec(name)
        fetched = fetch_spec(spec, revision=revision, allow=allow, **how)
    else:
        fetched = fetch(name, revision=revision, kind="dataset" if dataset else "model", allow=allow, **how)
    checked = None if dataset or allow or fetched.is_partial else _check(fetched, spec)
    return {
        "folder": str(fetched.folder),
        "repo": fetched.repo,
        "revision": fetched.revision,
        "commit": fetched.commit,
        "source": fetched.source,
        "files": fetched.files,
        "bytes": sum(fetched.files.values()),
        "fetched_bytes": fetched.fetched_bytes,
        "left": fetched.left,
        "model": spec.name if spec else checked,
        "checked": checked is not None,
    }


def _check(fetched: Fetched, spec: Any) -> str | None:
    """The family that config and tensors turn out to be of; None: unknown, which the user is told."""
    from slimecli.weights.check import check_folder

    found = check_folder(fetched.folder, spec)
    return found.family.model_type if found else None


def cli(
    name: Annotated[str, typer.Argument(metavar="NAME|OWNER/NAME|file://DIR", help="what to fetch")],
    revision: Annotated[str, typer.Option("--revision", help="branch, tag or commit; default: the registry's")] = "",
    dataset: Annotated[bool, typer.Option("--dataset", help="a data set, not a model")] = False,
    out: OutOpt = "",
    allow: Annotated[list[str] | None, typer.Option("--allow", metavar="GLOB", help="only these files")] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="GLOB", help="not these files")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="use only what is in the cache")] = False,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL|file://DIR", help="hub or mirror; default: HF_ENDPOINT")
    ] = "",
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
        endpoint=endpoint,
    )
    for reason, why in LEFT.items():
        if names := result["left"].get(reason):
            console.note(f"{why}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else ""))
    if json_:
        console.emit(result)
        return
    at = f" at commit {result['commit']}" if result["commit"] else ""
    size = f"{len(result['files'])} files, {result['bytes'] / 1e9:.3f} GB"
    checked = f", checked as {result['model']}" if result["checked"] else ""
    console.say(f"{result['repo']}{at}: {size} ({result['fetched_bytes'] / 1e9:.3f} GB fetched){checked}")
    console.emit_line(result["folder"])
    if result["checked"]:
        console.hint(f"slime plan --recipe grpo --model {result['folder']}", "what training it would take")
