"""Finding the answer in a response."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from slimecli.errors import DataError, nearest

_NUMBER = re.compile(r"-?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_boxed(text: str) -> str | None:
    """Content of the last \\boxed{} or \\fbox{}, braces matched; None when there is none or it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    if text.startswith("\\boxed ", start):
        return text[start + 7 :].split("$")[0].strip()
    opening = text.find("{", start)
    if opening < 0:
        return None
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[opening + 1 : position].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number, thousands commas removed. A sign counts only where a number may begin: "5-3" ends in 3."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    number = last.group().replace(",", "")
    before = text[: last.start()].rstrip()[-1:]
    return number.lstrip("-") if before.isalnum() or before == ")" else number


def _whole(text: str) -> str | None:
    return text.strip()


def _last_word(text: str) -> str | None:
    words = text.split()
    return words[-1] if words else None


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _answer_tag(text: str) -> str | None:
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "whole": _whole,
    "last_number": last_number,
    "last_word": _last_word,
    "last_line": _last_line,
    "answer_tag": _answer_tag,
    "boxed": extract_boxed,
}
"""metadata.extract -> function(response) -> answer, or None when the response holds none"""


def extract(response: str, metadata: dict[str, Any]) -> str | None:
    """The answer of a response, found as the row's metadata.extract says; the whole response by default."""
    name = metadata.get("extract", "whole")
    if name not in EXTRACTORS:
        raise DataError(
            f"metadata.extract = {name!r} is unknown{nearest(str(name), list(EXTRACTORS))}",
            f"use one of {', '.join(EXTRACTORS)}",
        )
    return EXTRACTORS[name](response)
