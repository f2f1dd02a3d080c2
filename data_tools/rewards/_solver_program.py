"""The process behind solver.py: a question a line on stdin, an answer a line on stdout. No slime here."""

from __future__ import annotations

import ast
import json
import resource
import sys
from typing import Any

MEMORY = 4 << 30


def _equal(first: str, second: str) -> bool:
    import sympy as library

    sympy: Any = library
    names: dict[str, Any] = {"pi": sympy.pi, "inf": sympy.oo, "i": sympy.I}
    functions = {n: getattr(sympy, n) for n in ("sqrt", "sin", "cos", "tan", "log", "exp")} | {"ln": sympy.log}
    operators: dict[type[ast.operator], Any] = {
        ast.Add: lambda a, b: a + b,
        ast.Sub: lambda a, b: a - b,
        ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b,
        ast.Pow: lambda a, b: a**b,
    }

    def build(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return sympy.nsimplify(repr(node.value), rational=True)
        if isinstance(node, ast.Name):
            return names.setdefault(node.id, sympy.Symbol(node.id))
        if isinstance(node, ast.UnaryOp):
            return -build(node.operand) if isinstance(node.op, ast.USub) else build(node.operand)
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](build(node.left), build(node.right))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return functions[node.func.id](*[build(a) for a in node.args])

    a, b = (build(ast.parse(text, mode="eval").body) for text in (first, second))
    if any(value.has(sympy.nan, sympy.zoo) for value in (a, b)):
        return False
    return bool(sympy.simplify(a - b) == 0)


def _math_verify(response: str, label: str) -> bool:
    from math_verify import parse, verify

    gold = parse(label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The reply to one question."""
    try:
        if question["op"] == "equal":
            return {"answer": _equal(question["first"], question["second"])}
        return {"answer": _math_verify(question["response"], question["label"])}
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError):
        return {"answer": False}  # nothing that has a value


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
