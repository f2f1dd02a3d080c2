"""Reading an answer as arithmetic: numbers, + - * / ^, roots, fractions and a few functions; never run as Python."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from slimecli.data_tools.rewards import solver

_PROBES = (0.7391, 1.6180, 2.2360)
"""values tried for a variable; two different expressions hardly agree at all three"""
_MAX_EXPONENT = 1000
_MAX_LENGTH = 300
CONSTANTS = ("pi", "inf", "i")
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


def same_value(first: str, second: str) -> bool:
    """Whether two plain texts are arithmetic of the same value. Raises SolverTimeout when sympy finds no end."""
    try:
        trees = [read(first), read(second)]
        names = [_variables(tree) for tree in trees]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # not arithmetic: only equal texts are equal
    if names[0] != names[1] or len(names[0]) > 3:
        return False
    try:
        return all(_agree(trees, names[0], probe) for probe in _PROBES)
    except (ValueError, KeyError, ArithmeticError, TypeError, RecursionError):
        return _symbolic(first, second)


def _agree(trees: list[ast.Expression], names: set[str], probe: float) -> bool:
    values = {name: probe + 0.37 * i for i, name in enumerate(sorted(names))}
    a, b = (_value(tree.body, values) for tree in trees)
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def _symbolic(first: str, second: str) -> bool:
    """Not a real number at some probe: sympy decides, if what it would be given is small and harmless."""
    texts = [as_python(first), as_python(second)]
    if any(re.search(r"\*\*\s*\(?-?\d{3,}|\*\*[^*]*\*\*", t) or not _is_plain(t) for t in texts):
        return False
    return solver.equal(*texts)


def _is_plain(text: str) -> bool:
    """Only the nodes that arithmetic has."""
    allowed = (
        ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load, ast.Pow, ast.USub, ast.UAdd,
        *_OPERATORS,
    )  # fmt: skip
    return all(
        isinstance(node, allowed)
        and (not isinstance(node, ast.Constant) or type(node.value) in (int, float))
        and (not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS))
        for node in ast.walk(ast.parse(text, mode="eval"))
    )


def _variables(tree: ast.Expression) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - {*_FUNCTIONS, *CONSTANTS}


def as_python(text: str) -> str:
    """Powers as ** and products written out."""
    if len(text) > _MAX_LENGTH or not text:
        raise ValueError("too long to be an answer")
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text).replace("^", "**")
    text = re.sub(r"(?<=[\d)])(?=[a-zA-Z(\\])", "*", text)
    return re.sub(r"(?<![\d.])0+(?=\d)", "", text)


def read(text: str) -> ast.Expression:
    """The syntax tree of an answer."""
    return ast.parse(as_python(text), mode="eval")


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
