"""Equality of mathematical answers: the last \\boxed{} of the response against the label.

Two answers are equal when their normalised texts are, when both can be read as arithmetic and have the same value, or
when the rules of MATH or PRM800K (mathd.py) say so. Beyond those rules a fraction need not be reduced and the members
of a set need no order. Nothing that a model writes is ever evaluated as Python.
"""

from __future__ import annotations

import re
from typing import Any

from slimecli.data_tools.rewards.arithmetic import same_value
from slimecli.data_tools.rewards.extract import extract, extract_boxed
from slimecli.data_tools.rewards.mathd import mathd_equal, several, sympy_equal
from slimecli.errors import DataError

_DROPPED = re.compile(
    r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\^\\circ|\^\{\\circ\}|\\displaystyle|\\mathrm|\\text\{\s[^}]*\}"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mbox)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(\d)(\d)")
_ROOT = re.compile(r"\\sqrt\{([^{}]*)\}")
_SHORT_ROOT = re.compile(r"\\sqrt(\d+|[a-z])")
_NAMED = re.compile(r"^[a-zA-Z]{1,2}=")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the answer equals the label. metadata.extract changes where the answer is looked for."""
    if label is None or not label.strip():
        raise DataError("reward math needs a label and the row has none", "check data.label_key")
    wanted = extract_boxed(label) or label
    answer = extract(response, metadata) if metadata.get("extract") else extract_boxed(response)
    return float(bool(answer) and equal(answer or "", wanted))


def equal(first: str, second: str) -> bool:
    """Whether two answers say the same. Raises SolverTimeout when it cannot be decided in time."""
    a, b = normalise(first), normalise(second)
    if not a or not b:
        return False
    return a == b or _parts_equal(a, b) or mathd_equal(first, second) or sympy_equal(first, second)


def _parts_equal(a: str, b: str) -> bool:
    parts_a, parts_b = _parts(a), _parts(b)
    if len(parts_a) != len(parts_b) or (len(parts_a) > 1 and (a[0], a[-1]) != (b[0], b[-1])):
        return False
    if len(parts_a) > 1 and a[0] == "{":
        for part in parts_a:
            partner = next((p for p in parts_b if p == part or same_value(p, part)), None)
            if partner is None:
                return False
            parts_b.remove(partner)
        return True
    return all(x == y or same_value(x, y) for x, y in zip(parts_a, parts_b, strict=True))


def normalise(text: str) -> str:
    """LaTeX -> plain arithmetic text without white space, units or decoration."""
    text = several(text).replace("−", "-")
    text = _WRAPPED.sub(r"\1", _DROPPED.sub("", text.strip().rstrip(".")))
    text = _SHORT_FRACTION.sub(r"(\1)/(\2)", text)
    text = _SHORT_ROOT.sub(r"sqrt(\1)", text)
    for _ in range(8):  # innermost first; deeper nesting than this is left as text
        text, before = _ROOT.sub(r"sqrt(\1)", _FRACTION.sub(r"((\1)/(\2))", text)), text
        if text == before:
            break
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\div", "/").replace("\\pi", "pi")
    text = text.replace("\\{", "{").replace("\\}", "}").replace("\\infty", "inf")
    return _THOUSANDS.sub("", _NAMED.sub("", re.sub(r"\s+", "", text)))


def _parts(text: str) -> list[str]:
    """Members of a tuple, set or interval; the text itself when it is none."""
    inner = text[1:-1] if len(text) > 2 and text[0] in "([{" and text[-1] in ")]}" else text
    depth, parts = 0, [""]
    for char in inner:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts if len(parts) > 1 else [text]
