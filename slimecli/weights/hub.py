"""Models and data sets from the hub, a mirror of it (HF_ENDPOINT), or a `file://` folder."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from slimecli import env, files
from slimecli.errors import DataError, SlimeError

MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")
"""what a model needs; pickled weights are left on the hub"""
SPARE_BYTES = 256 << 20
"""disk space that must remain free after a download (bytes)"""


def fetch(
    repo: str,
    *,
    revision: str = "",
    kind: Literal["model", "dataset"] = "model",
    out: Path | None = None,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    offline: bool = False,
) -> Path:
    """Bring a repository's files to this machine; returns their folder.

    Args:
        repo: `owner/name`, or a `file://` folder.
        revision: branch, tag or commit; empty: main.
        out: copy into this folder; None: the shared hub cache.
        allow: glob patterns of wanted files; empty: MODEL_FILES for a model, all for a data set.
        ignore: glob patterns of unwanted files.
        offline: use only what is in the cache.
    """
    wanted = list(allow) or (list(MODEL_FILES) if kind == "model" else None)
    if repo.startswith("file://"):
        return _from_folder(Path(unquote(urlparse(repo).path)), out, wanted, list(ignore))
    import huggingface_hub
    import huggingface_hub.errors as hub

    options: dict[str, Any] = {
        "repo_type": kind,
        "revision": revision or None,
        "local_dir": out,
        "allow_patterns": wanted,
        "ignore_patterns": list(ignore) or None,
        "token": env.hf_token(),
        "endpoint": env.hf_endpoint(),
        "local_files_only": offline,
    }
    at = f"{repo}@{revision}" if revision else repo
    try:
        if not offline:
            _check_space(huggingface_hub.snapshot_download(repo, **options, dry_run=True), out or env.hf_home(), at)
        with files.explain_disk_errors(out or env.hf_home()):
            return Path(str(huggingface_hub.snapshot_download(repo, **options)))
    except hub.HFValidationError as error:
        raise SlimeError(f"{repo!r} is not a repository name: {error}", "write owner/name") from None
    except (OSError, hub.HfHubHTTPError) as error:
        raise _explain(error, at, offline) from error


def _explain(error: Exception, at: str, offline: bool) -> SlimeError:
    """What went wrong, from the hub library's exception; the most specific class first."""
    import huggingface_hub.errors as hub

    place = env.hf_endpoint()
    if isinstance(error, hub.DryRunError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the dry run wraps whatever the hub said
    if isinstance(error, hub.GatedRepoError):
        return SlimeError(
            f"{at} is gated: its licence must be accepted first",
            f"open {place}/{at.split('@')[0]} , accept, then `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return SlimeError(f"{at}: there is no such revision at {place}", "name a branch, tag or commit of it")
    if isinstance(error, hub.RepositoryNotFoundError):
        return SlimeError(
            f"{at}: no such repository at {place}, or it is private",
            "check the spelling (`slime models` shows repositories); for a private one set HF_TOKEN",
        )
    if offline or isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        why = "offline mode is on" if offline or isinstance(error, hub.OfflineModeIsEnabled) else f"{place} is silent"
        return SlimeError(
            f"{at} is not completely in the cache, and {why}",
            "connect (unset HF_HUB_OFFLINE, drop --offline), set HF_ENDPOINT to a mirror, or use file:///FOLDER",
        )
    return SlimeError(f"download of {at} from {place} failed: {error}", "try again: what has arrived is kept")


def _check_space(planned: object, place: Path, at: str) -> None:
    """Refuse a download that cannot fit, before its first byte."""
    assert isinstance(planned, list)
    needed = sum(int(f.file_size or 0) for f in planned if f.will_download)
    _need_space(needed, place, at)


def _need_space(needed: int, place: Path, at: str) -> None:
    free = shutil.disk_usage(files.existing_parent(place.absolute())).free
    if needed and needed + SPARE_BYTES > free:
        raise SlimeError(
            f"{at} needs {(needed + SPARE_BYTES) / 1e9:.2f} GB with some to spare, {place} has {free / 1e9:.2f} GB",
            "free space, or put the cache elsewhere: HF_HOME=/bigger/disk, or --out DIR",
        )


def _from_folder(source: Path, out: Path | None, allow: list[str] | None, ignore: list[str]) -> Path:
    """A `file://` source: used where it lies, or copied to `out`."""
    if not source.is_dir():
        raise DataError(f"file://{source} is not a folder", "give an absolute path to a folder")
    if out is None:
        return source
    names = [str(p.relative_to(source)) for p in sorted(source.rglob("*")) if p.is_file()]
    chosen = [
        n
        for n in names
        if (allow is None or any(fnmatch.fnmatch(n, a) for a in allow))
        and not any(fnmatch.fnmatch(n, i) for i in ignore)
    ]
    if not chosen:
        raise DataError(f"file://{source} has none of the files wanted", "check --allow and --ignore")
    _need_space(sum((source / n).stat().st_size for n in chosen), out, f"file://{source}")
    with files.explain_disk_errors(out):
        for name in chosen:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, out / name)
    return out
