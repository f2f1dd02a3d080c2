"""An exported folder to a repository on the hub, or on a mirror of it (HF_ENDPOINT)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from slimecli import env, files
from slimecli.errors import SlimeError, UsageError
from slimecli.weights.partial import JOURNAL

LOCAL_ONLY = (files.DONE, JOURNAL)
"""files that mean something on this machine alone"""


def check_access(repo: str) -> str:
    """Refuse what cannot work before hours go into an export; returns the user's name."""
    import huggingface_hub

    _check_name(repo)
    if huggingface_hub.get_token() is None:
        raise SlimeError(
            f"there is no token to push to {repo} with", "`hf auth login`, or set HF_TOKEN to one that may write"
        )
    with _explained(repo):
        user: dict[str, Any] = huggingface_hub.HfApi(endpoint=env.hf_endpoint()).whoami()
    return str(user.get("name", ""))


def push_folder(folder: Path, repo: str, *, private: bool = False) -> dict[str, Any]:
    """Make the repository if it is missing, upload the folder, and ask the hub what it has now.

    Args:
        repo: owner/name.
        private: of a new repository; an existing one stays as it is.

    Returns {"repo", "commit", "url"}.
    """
    import huggingface_hub

    _check_name(repo)
    api = huggingface_hub.HfApi(endpoint=env.hf_endpoint())
    with _explained(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, ignore_patterns=list(LOCAL_ONLY), commit_message="slime export"
        )
        there = {f.path: f.size for f in api.list_repo_tree(repo, recursive=True) if hasattr(f, "size")}
    here = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    wrong = [n for n, size in here.items() if n not in LOCAL_ONLY and there.get(n) != size]
    if wrong:
        raise SlimeError(f"{repo} has not taken over {', '.join(wrong[:3])} ({len(wrong)} file(s))", "push again")
    return {"repo": repo, "commit": commit.oid, "url": f"{env.hf_endpoint()}/{repo}"}


def _check_name(repo: str) -> None:
    owner, slash, name = repo.partition("/")
    if not slash or not owner or not name or "/" in name:
        raise UsageError(f"--push {repo!r} is no repository", "write --push OWNER/NAME")


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what the hub library says into what to do."""
    import huggingface_hub.errors as hub

    # the base error of whichever HTTP library the hub package is built on, and OSError
    network = cast("tuple[type[Exception], ...]", hub.HfHubHTTPError.__bases__)
    try:
        yield
    except hub.HFValidationError as error:
        raise UsageError(f"--push {repo!r} is no repository: {error}", "write --push OWNER/NAME") from None
    except hub.OfflineModeIsEnabled:
        raise SlimeError(f"cannot push to {repo}: offline mode is on", "unset HF_HUB_OFFLINE and connect") from None
    except hub.HfHubHTTPError as error:
        raise _refused(error, repo) from error
    except network as error:
        raise SlimeError(
            f"cannot reach {env.hf_endpoint()} to push to {repo}: {error}", "check the connection and HF_ENDPOINT"
        ) from None


def _refused(error: Any, repo: str) -> SlimeError:
    status = error.response.status_code if error.response is not None else 0
    if status == 401:
        return SlimeError(
            f"{env.hf_endpoint()} does not accept your token", "`hf auth login` again, or correct HF_TOKEN"
        )
    if status in (403, 404):
        return SlimeError(
            f"your token may not write to {repo} at {env.hf_endpoint()}",
            "use a token with write access to that owner, or push to your own name",
        )
    return SlimeError(f"push to {repo} failed: {error}", "try again: what has been uploaded is not sent again")
