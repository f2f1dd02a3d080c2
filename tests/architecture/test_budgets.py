"""Sizes that a reader can hold: file 400 lines, function 60, nesting 4, parameters 8."""

import ast

from tests.architecture.sources import ROOT, library_files, module_name, tree_of

FILE, FUNCTION, NESTING, PARAMETERS = 400, 60, 4, 8
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
CLI_SHELLS = "cli"
"""a Typer shell has one parameter per flag, which is its job"""


def _functions():
    for path in library_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def _depth(body: list[ast.stmt], level: int = 0) -> int:
    deepest = level
    for node in body:
        if not isinstance(node, BLOCKS):
            continue
        parts = [getattr(node, name, []) for name in ("body", "finalbody")]
        parts += [h.body for h in getattr(node, "handlers", [])] + [c.body for c in getattr(node, "cases", [])]
        orelse = getattr(node, "orelse", [])
        # `elif` is written at the same depth as its `if`
        is_elif = isinstance(node, ast.If) and len(orelse) == 1 and isinstance(orelse[0], ast.If)
        deepest = max([deepest, *(_depth(p, level + 1) for p in parts), _depth(orelse, level + (not is_elif))])
    return deepest


def _name(path, node) -> str:
    return f"{module_name(path)}.{node.name}:{node.lineno}"


def test_files():
    tests = list((ROOT / "tests").rglob("*.py"))
    assert len(tests) > 100
    every = [*library_files(), *tests]
    long = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in every}
    assert {k: v for k, v in long.items() if v > FILE} == {}


def test_functions():
    sizes = {_name(p, n): (n.end_lineno or 0) - n.lineno + 1 for p, n in _functions()}
    assert {k: v for k, v in sizes.items() if v > FUNCTION} == {}


def test_nesting():
    depths = {_name(p, n): _depth(n.body) for p, n in _functions()}
    assert max(depths.values()) > 1
    assert {k: v for k, v in depths.items() if v > NESTING} == {}


def test_parameters():
    counts = {}
    for path, node in _functions():
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = [a for a in every if a.arg not in ("self", "cls")]
        limit = PARAMETERS + 1 if node.name == CLI_SHELLS else PARAMETERS  # --json comes on top of eight flags
        if len(own) > limit:
            counts[_name(path, node)] = len(own)
    assert counts == {}


def test_the_depth_counter_counts():
    tree = ast.parse("def f():\n for a in b:\n  if a:\n   with c:\n    pass\n  elif d:\n   pass")
    assert _depth(tree.body[0].body) == 3
