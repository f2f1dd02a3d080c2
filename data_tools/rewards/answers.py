"""Scorers with an answer format of their own: deepscaler, dapo, gpqa and format."""

from __future__ import annotations

import re
from typing import Any

from slimecli.data_tools.rewards.extract import EXTRACTORS, extract, extract_boxed
from slimecli.data_tools.rewards.mathd import mathd_equal, sympy_equal
from slimecli.errors import DataError

THINK_END = "</think>"
_DAPO_TAIL = 300
"""last characters of a response in which DAPO looks for the answer"""
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_DAPO_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_LETTERS = "ABCDEFGHIJ"
_STATED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(?:final\s+)?(?:answer|option|choice)\s*(?:is|:)?\s*\(?\s*\**\(?([A-Z])\b(?![a-z'~\d])",
        r"\b([A-Z])\)?\**\s+is\s+(?:the\s+)?correct\b",
    )
)


def _label(label: str | None, name: str) -> str:
    if label is None or not label.strip():
        raise DataError(f"reward {name} needs a label and the row has none", "check data.label_key")
    return label.strip()


def deepscaler(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the boxed answer after </think> (or ###Response) equals the label by the rules of MATH or PRM800K."""
    wanted = _label(label, "deepscaler")
    if THINK_END in response:
        response = response.rpartition(THINK_END)[2]
    elif "###Response" in response:
        response = response.partition("###Response")[2]
    else:
        return 0.0
    answer, wanted = extract_boxed(response), extract_boxed(wanted) or wanted
    return float(bool(answer) and (mathd_equal(answer or "", wanted) or sympy_equal(answer or "", wanted)))


def dapo(response: str, label: str | None, metadata: dict[str, Any]) -> dict[str, float]:
    """{"score": 1 or -1, "acc": 1 or 0}: the last `Answer: ...` within the last 300 characters; labels are integers."""
    wanted = _normalise_dapo(_label(label, "dapo"))
    try:
        number = float(wanted)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise DataError(
            f"reward dapo compares integers, and the label is {label!r}", "use reward.type = math"
        ) from None
    right = dapo_answer(response) == str(int(number))
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def dapo_answer(response: str) -> str | None:
    """What stands after the last `Answer:`, normalised."""
    found = _DAPO_ANSWER.findall(response[-_DAPO_TAIL:])
    return _normalise_dapo(found[-1]) if found else None


def _normalise_dapo(text: str) -> str:
    """The answer normalisation of Minerva (Lewkowycz et al. 2022, appendix D.1), as DAPO uses it."""
    text = text.split("=")[-1].replace("−", "-")
    for old, new in _DAPO_REPLACED:
        text = text.replace(old, new)
    for old in _DAPO_REMOVED:
        text = text.replace(old, "")
    text = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", text)
    for name in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{name}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def gpqa(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the chosen letter is the right one; without letters, when the right text stands in the response."""
    said = response.rpartition(THINK_END)[2].strip()
    choices = _choices(metadata.get("choices"))
    valid = [str(x).upper() for x in metadata.get("valid_letters") or _LETTERS[: len(choices) or None]]
    right = _right_letter(label, metadata, choices, valid)
    chosen = _chosen_letter(said, valid)
    if right and chosen:
        return float(right == chosen)
    texts = [metadata.get("correct_answer"), metadata.get("answer_text")]
    texts += [choices[valid.index(right)] if right in valid and valid.index(right) < len(choices) else None]
    texts += [label if label and len(label.strip()) > 1 else None]
    wanted = [plain for plain in (_words(str(t)) for t in texts if t) if plain]
    if not wanted and not right:
        raise DataError(
            "reward gpqa needs a label, metadata.correct_letter or metadata.choices", "check data.label_key"
        )
    return float(any(f" {plain} " in f" {_words(said)} " for plain in wanted))


def _choices(stored: Any) -> list[str]:
    values = stored.values() if isinstance(stored, dict) else stored or []
    return [str(v) for v in values]


def _right_letter(label: str | None, metadata: dict[str, Any], choices: list[str], valid: list[str]) -> str:
    stated = str(metadata.get("correct_letter") or "").strip().upper()
    if stated or label is None:
        return stated
    text = label.strip().strip("().")
    if len(text) == 1 and text.upper() in valid:
        return text.upper()
    if text.isdigit() and int(text) < len(valid):
        return valid[int(text)]
    same = [letter for letter, choice in zip(valid, choices, strict=False) if _words(choice) == _words(text)]
    return same[0] if same else ""


def _chosen_letter(said: str, valid: list[str]) -> str:
    boxed = (extract_boxed(said) or "").strip("(). ").upper()
    if boxed in valid:
        return boxed
    for pattern in _STATED:
        found = [m.group(1).upper() for m in pattern.finditer(said) if m.group(1).upper() in valid]
        if found:
            return found[-1]
    # "A cat" and "I think" name no choice
    alone = [x for x in re.findall(r"(?<![\w'])(?![AI] +[a-z])([A-Z])(?![\w'~])", said) if x in valid]
    return alone[-1] if alone else ""


def _words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def form(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the answer stands where metadata.extract (default: boxed) looks, once, after any closed <think> block.

    metadata.format, a regular expression, replaces this rule: it must match the whole response.
    """
    if metadata.get("format"):
        import regex as engine

        from slimecli.data_tools.rewards.text import REGEX_SECONDS

        try:
            found = engine.fullmatch(metadata["format"], response.strip(), engine.DOTALL, timeout=REGEX_SECONDS)
        except engine.error as error:
            raise DataError(f"metadata.format is not a regular expression: {error}", "mend the row") from None
        return float(found is not None)
    opened, closed = response.count("<think>"), response.count(THINK_END)
    if closed > 1 or opened > closed or (opened and not response.lstrip().startswith("<think>")):
        return 0.0
    said = response.rpartition(THINK_END)[2]
    place = str(metadata.get("extract") or "boxed")
    if place not in ("boxed", "answer_tag"):
        return float(bool(extract(said, metadata)))
    mark = "\\boxed{" if place == "boxed" else "<answer>"
    return float(said.count(mark) == 1 and bool(EXTRACTORS[place](said)))
