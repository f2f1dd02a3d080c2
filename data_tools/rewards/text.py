"""Scorers that compare text."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from slimecli.data_tools.rewards.extract import extract
from slimecli.errors import DataError

REGEX_SECONDS = 5.0
"""a pattern that backtracks without end holds Python's lock, so it must stop itself"""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")


def _needed(label: str | None, name: str) -> str:
    if label is None or not label.strip():
        raise DataError(f"reward {name} needs a label and the row has none", "check data.label_key")
    return label


def exact(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the answer (metadata.extract, else the whole response) equals the label, outer white space aside."""
    wanted = _needed(label, "exact").strip()
    answer = extract(response, metadata)
    return float(answer is not None and answer.strip() == wanted)


def regex(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the label, a pattern (metadata.pattern wins), matches anywhere in the answer."""
    import regex as engine

    pattern = metadata.get("pattern") or _needed(label, "regex")
    answer = extract(response, metadata)
    try:
        return float(answer is not None and engine.search(pattern, answer, timeout=REGEX_SECONDS) is not None)
    except engine.error as error:
        raise DataError(f"{pattern!r} is not a regular expression: {error}", "mend the row's pattern") from None


def em(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the answer equals any of metadata.golds (else the label): no case, punctuation or articles (SQuAD)."""
    golds = [str(g) for g in metadata.get("golds") or [_needed(label, "em")]]
    answer = extract(response, metadata)
    return float(answer is not None and words(answer) in [words(gold) for gold in golds])


def f1(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """Token F1 of SQuAD between answer and label: no case, punctuation or articles; yes/no must match exactly."""
    wanted = words(_needed(label, "f1"))
    given = words(extract(response, metadata) or "")
    if given == wanted:
        return 1.0
    if " ".join(wanted) in _CLOSED or " ".join(given) in _CLOSED:
        return 0.0
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, as SQuAD compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
