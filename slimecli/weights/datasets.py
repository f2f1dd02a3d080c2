"""Data sets on the hub: `hf://OWNER/NAME[@REVISION][#SUBSET/SPLIT][@[a:b]]` becomes a folder on this machine."""

from __future__ import annotations

import contextlib
import re

from slimecli.data_tools.folders import DEFAULT, declared_files
from slimecli.errors import DataError, UsageError
from slimecli.weights.hub import fetch

_PLACE = re.compile(
    r"hf://(?P<repo>[^@#/]+/[^@#/]+)(@(?P<revision>[^#@\[]+))?(#(?P<choice>[^@]*))?(?P<part>@\[-?\d*:-?\d*\])?"
)


def localise(place: str) -> str:
    """The same place on this machine: fetched into the shared cache if it is on the hub; any other as it is.

    Where the data set's README.md says which files a split is made of, no others are fetched.
    """
    if not place.startswith("hf://"):
        return place
    match = _PLACE.fullmatch(place)
    if match is None:
        raise UsageError(
            f"{place!r} is no data set on the hub",
            "write hf://OWNER/NAME#SUBSET/SPLIT, e.g. hf://openai/gsm8k#main/train",
        )
    repo, revision, choice = match["repo"], match["revision"] or "", match["choice"] or ""
    patterns: list[str] = []
    with contextlib.suppress(DataError):  # no README.md: then every file is fetched, and names tell
        head = fetch(repo, revision=revision, kind="dataset", allow=("README.md",))
        revision = head.commit or revision
        patterns = _wanted(declared_files(head.folder / "README.md"), choice)
    found = fetch(repo, revision=revision, kind="dataset", allow=("README.md", *patterns) if patterns else ())
    return f"{found.folder}#{choice}{match['part'] or ''}" if choice or match["part"] else str(found.folder)


def _wanted(declared: dict[str, dict[str, list[str]]], choice: str) -> list[str]:
    """Patterns of the subset that is wanted; [] where that cannot be told from what is declared."""
    names = choice.split("/")
    subset = next((n for n in names if n in declared), DEFAULT if DEFAULT in declared else "")
    if not subset and len(declared) == 1:
        subset = next(iter(declared))
    return [p for patterns in declared.get(subset, {}).values() for p in patterns]
