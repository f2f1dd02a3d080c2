"""Equality of mathematical answers: the last \\boxed{} of the response against the label.

Two answers are equal when their normalised texts are, or when both can be read as arithmetic and agree at several
values of their variables. The reader is our own and knows numbers, + - * / ^, roots, fractions and a few functions:
nothing that a model writes is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from slimecli.data_tools.rewards.extract import EXTRACTORS, extract, extract_boxed
from slimecli.errors import DataError

_PROBES = (0.7391, 1.6180, 2.2360)
"""values tried for a variable; two different expressions hardly agree at all three"""
_MAX_EXPONENT = 1000
_MAX_LENGTH = 300

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
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "log": math.log,
    "ln": math.log,
    "exp": math.exp,
}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the answer equals the label. metadata.extract changes where the answer is looked for."""
    if label is None or not label.strip():
        raise DataError("reward math needs a label and the row has none", "check data.label_key")
    wanted = extract_boxed(label) or label
    answer = extract(response, metadata) if metadata.get("extract") in EXTRACTORS else extract_boxed(response)
    return float(bool(answer) and equal(answer or "", wanted))


def equal(first: str, second: str) -> bool:
    """Whether two answers say the same."""
    a, b = normalise(first), normalise(second)
    if a == b:
        return bool(a)
    parts_a, parts_b = _parts(a), _parts(b)
    if len(parts_a) != len(parts_b) or (len(parts_a) > 1 and (a[0], a[-1]) != (b[0], b[-1])):
        return False
    return all(x == y or _same_value(x, y) for x, y in zip(parts_a, parts_b, strict=True))


def normalise(text: str) -> str:
    """LaTeX -> plain arithmetic text without white space, units or decoration."""
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


def _same_value(first: str, second: str) -> bool:
    try:
        trees = [_read(first), _read(second)]
        names = [{n.id for n in ast.walk(t) if isinstance(n, ast.Name)} - {*_FUNCTIONS, "pi"} for t in trees]
        if names[0] != names[1] or len(names[0]) > 3:
            return False
        for probe in _PROBES:
            values = {name: probe + 0.37 * i for i, name in enumerate(sorted(names[0]))}
            a, b = (_value(t.body, values) for t in trees)
            if not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12):
                return False
    except (SyntaxError, ValueError, KeyError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return False  # not arithmetic: only equal texts are equal
    return True


def _read(text: str) -> ast.Expression:
    if len(text) > _MAX_LENGTH or not text:
        raise ValueError("too long to be an answer")
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text).replace("^", "**")
    text = re.sub(r"(?<=[\d)])(?=[a-zA-Z(\\])", "*", text)
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    return ast.parse(text, mode="eval")


def _value(node: ast.AST, values: dict[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        return math.pi if node.id == "pi" else values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, values)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
        return _FUNCTIONS[node.func.id](_value(node.args[0], values))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError("exponent too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return float(result)
