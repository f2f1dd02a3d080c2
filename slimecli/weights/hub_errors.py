"""What the hub's refusals mean, and what to do about each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimecli.errors import SlimeError, UsageError, nearest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from slimecli.weights.hub import Request

SHOWN = 8
"""branches and tags that a message lists at most"""


def network_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises besides its HTTP client's exceptions."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    return (HfHubHTTPError, OfflineModeIsEnabled, ConnectionError)


def check_name(repo: str) -> None:
    """Refuse what cannot be the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(
            f"{repo!r} is not a repository name: {error}", "write owner/name; a folder is file:///DIR"
        ) from None


def is_silence(error: Exception) -> bool:
    """No answer, or none that says anything about the repository."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500 or response.status_code == 429


def reason(error: Exception) -> str:
    """One line of an exception."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    return (str(error) or type(error).__name__).splitlines()[0]


def not_cached(what: str) -> SlimeError:
    """Offline, and something is missing."""
    return SlimeError(
        what,
        "connect (unset HF_HUB_OFFLINE, drop --offline), set HF_ENDPOINT to a mirror, or use file:///FOLDER",
    )


def silent(asked: Request, why: str) -> SlimeError:
    """The hub cannot be reached, and the cache cannot stand in for it."""
    return SlimeError(
        f"{asked.place} does not answer: {why}; {asked.at} is not completely in the cache either",
        "check the network and the proxy; HF_ENDPOINT=URL uses a mirror, HF_ENDPOINT=file:///DIR a local one",
    )


def explain(error: Exception, api: HfApi, asked: Request) -> SlimeError:
    """What went wrong, from the hub library's exception; the most specific class first."""
    import huggingface_hub.errors as hub

    at, place = asked.at, asked.place
    page = f"{place}/{'datasets/' if asked.kind == 'dataset' else ''}{asked.repo}"
    if isinstance(error, hub.GatedRepoError):
        return SlimeError(
            f"{at} is gated: its licence must be accepted first, by the user whose token is used",
            f"open {page} , accept, then `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, hub.DisabledRepoError):
        return SlimeError(f"{at} has been disabled by the hub", f"see {page}")
    if isinstance(error, hub.RevisionNotFoundError):
        return SlimeError(
            f"{at}: there is no such revision at {place}{_close_revision(api, asked)}",
            "name a branch, a tag, or the 40 digits of a commit",
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return _no_repository(api, asked)
    if isinstance(error, hub.RemoteEntryNotFoundError):
        return SlimeError(f"{at}: {place} lists a file that it does not serve: {reason(error)}", "use another mirror")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        return SlimeError(
            f"{place} refuses access to {at} (HTTP {status})",
            f"the token is wrong, expired or without rights: make one at {place}/settings/tokens, "
            "then `hf auth login` or set HF_TOKEN; without a token public repositories work",
        )
    return SlimeError(f"download of {at} from {place} failed: {reason(error)}", "try again: what has arrived is kept")


def _close_revision(api: HfApi, asked: Request) -> str:
    """Names that exist, as a clause."""
    names = _answer(lambda: [r.name for r in _refs(api, asked)]) or []
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"{nearest(asked.revision, names)}; there are {shown}"


def _refs(api: HfApi, asked: Request) -> list[Any]:
    found = api.list_repo_refs(asked.repo, repo_type=asked.kind)
    return [*found.branches, *found.tags]


def _no_repository(api: HfApi, asked: Request) -> SlimeError:
    """Perhaps it is of the other kind, perhaps the name is a slip."""
    from slimecli.model_specs import registry

    what = (
        f"{asked.at}: no such {'data set' if asked.kind == 'dataset' else 'model'} at {asked.place}, or it is private"
    )
    other = "model" if asked.kind == "dataset" else "dataset"
    if _answer(lambda: api.repo_exists(asked.repo, repo_type=other)):
        flag = "with --dataset" if other == "dataset" else "without --dataset"
        return SlimeError(f"{what}; there is a {other} repository of that name", f"call it {flag}")
    known = [s.repo for s in registry().values() if s.repo]
    return SlimeError(
        f"{what}{nearest(asked.repo, known)}",
        "check the spelling (`slime models` shows repositories); for a private one `hf auth login` or set HF_TOKEN",
    )


def _answer(question: Any) -> Any:
    """A second question, asked to word a message better; None where that has no answer either."""
    from slimecli.weights.transfer import transport_error

    try:
        return question()
    except (*network_errors(), transport_error()):
        return None
