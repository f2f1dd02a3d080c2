"""The tools that come with slime. BUILTIN: name -> maker of the tool, from the recipe's section."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from slimecli.data_tools.rewards.threads import in_thread
from slimecli.data_tools.sandbox import LEAST, PARTS, Limits, Outcome, run_python
from slimecli.errors import UsageError
from slimecli.recipe_tools import ToolsSection
from slimecli.tools.base import Tool, ToolError

BUILTIN: dict[str, str] = {
    "calculator": "slimecli.tools.builtin:calculator",
    "python": "slimecli.tools.builtin:python",
    "search": "slimecli.tools.builtin:search",
}
"""name -> function of the section"""

_MAX_LENGTH = 500
"""of an expression (characters)"""
_MAX_BITS = 10_000
"""of a whole number"""

_Number = int | float
_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(value: _Number, *digits: int) -> _Number:
    """Whole numbers are rounded to tens by a power of ten, whose size is looked at before it is computed."""
    if digits and abs(digits[0]) > _MAX_LENGTH:
        raise ValueError(f"round takes at most {_MAX_LENGTH} digits")
    return round(value, *digits)


_FUNCTIONS: dict[str, Callable[..., _Number]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin,
    "acos": math.acos, "atan": math.atan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(section: ToolsSection) -> Tool:
    """Arithmetic on numbers, exact on whole ones; nothing else of Python."""

    async def call(arguments: dict[str, Any]) -> str:
        return calculate(arguments["expression"])

    return Tool(
        name="calculator",
        description="Evaluates an arithmetic expression: + - * / // % ** and functions such as sqrt, log, sin, round.",
        parameters=_only("expression", "string", "e.g. (3 + 4) * 2 ** 5"),
        call=call,
    )


def calculate(expression: str) -> str:
    """The value of an expression as text. Raises ToolError."""
    if len(expression) > _MAX_LENGTH:
        raise ToolError(f"the expression is longer than {_MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return str(value)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        said = "not an expression" if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"{expression[:80]!r}: {said}") from None


def _value(node: ast.AST) -> _Number:
    result = _computed(node)
    if isinstance(result, complex):
        raise ValueError("not a real number")
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise ValueError("the number is too large")
    return result


def _computed(node: ast.AST) -> _Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise ValueError(f"no function {node.func.id}; there are {', '.join(_FUNCTIONS)}")
        return _FUNCTIONS[node.func.id](*(_value(a) for a in node.args))
    raise ValueError("only numbers, + - * / // % **, parentheses and functions")


def _power(base: _Number, exponent: _Number) -> _Number:
    """Its size is looked at before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the number is too large")
    result: _Number = base**exponent
    return result


def python(section: ToolsSection) -> Tool:
    """A Python program, run in the sandbox; every call begins anew."""
    limits = Limits(wall_s=section.timeout_s, cpu_s=section.timeout_s, memory_mb=section.python_memory_mb)
    required = {"required": PARTS, "best": LEAST, "limits": ()}[section.python_isolation]

    async def call(arguments: dict[str, Any]) -> str:
        code = arguments["code"]
        outcome = await in_thread(lambda: run_python(_shown_last(code), limits=limits, required=required))
        return _said(outcome, section.timeout_s)

    return Tool(
        name="python",
        description="Runs a Python program and gives what it prints, or the value of its last line. "
        "No variables are kept from call to call.",
        parameters=_only("code", "string", "the program"),
        call=call,
        timed=True,
    )


def _shown_last(code: str) -> str:
    """The program; an expression as its last statement is printed, as a Python prompt would."""
    try:
        tree = ast.parse(code)
        if not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return code
        last = tree.body[-1]
        value = ast.unparse(last.value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # the sandbox tells what is wrong with it
    lines = code.encode().splitlines(keepends=True)[: last.lineno]  # positions in a syntax tree count bytes
    head = b"".join(lines[:-1]) + lines[-1][: last.col_offset]
    return f"{head.decode()}(lambda value: None if value is None else print(value))(({value}))"


def _said(outcome: Outcome, seconds: float) -> str:
    if outcome.status == "ok":
        return outcome.stdout.rstrip() or "(no output; print what you want to see)"
    reasons = {"time": f"longer than {seconds:g} s", "output": "too much output", "killed": "killed: out of a limit"}
    lines = [part.rstrip() for part in (outcome.stdout, outcome.stderr) if part.strip()]
    if outcome.status in reasons:
        lines.append(reasons[outcome.status])
    raise ToolError("\n".join(lines) or "the program failed")


def search(section: ToolsSection) -> Tool:
    """Passages of a corpus file, ranked by BM25."""
    from slimecli.tools.search import open_index

    if not section.corpus:
        raise UsageError("the tool search has no corpus", "set tools.corpus to a .jsonl file with a column `text`")
    index = open_index(section.corpus)

    async def call(arguments: dict[str, Any]) -> str:
        hits = await in_thread(lambda: index.search(arguments["query"], section.search_results))
        shown = [f"[{i}] {p.title}\n{p.text}" if p.title else f"[{i}] {p.text}" for i, p in enumerate(hits, 1)]
        return "\n\n".join(shown) or "nothing found"

    return Tool(
        name="search",
        description="Finds the passages of a text collection that fit a query best.",
        parameters=_only("query", "string", "a few words"),
        call=call,
    )


def _only(name: str, kind: str, description: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind, "description": description}}, "required": [name]}
