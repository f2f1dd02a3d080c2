"""Reading Python files without running them: registries and hooks can be checked before anything heavy is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def registry_names(module: str, variable: str) -> list[str]:
    """Keys of a registry: the dict literal `variable` at the top of a slimecli module.

    Args:
        module: dotted name, e.g. `slimecli.algos`; it is read, not imported.
    """
    return list(registry_entries(module, variable))


def registry_entries(module: str, variable: str) -> dict[str, str]:
    """The registry itself, name -> "module:attr"."""
    path = _own_file(module)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == variable for t in targets):
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{path} has no dict literal {variable}")


def _own_file(module: str) -> Path:
    base = Path(__file__).parent.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def hook_problem(spec: str) -> str:
    """Why the hook `module:function`, `pkg.module.function` or `file.py:function` cannot load; empty if it can.

    Nothing is imported, so a function that a module only makes at run time is taken on trust if the module builds
    its names dynamically (a star import or `__getattr__`).
    """
    place, sep, name = spec.rpartition(":")
    if not sep:
        place, sep, name = spec.rpartition(".")
    if not sep or not place or not name.isidentifier():
        return f"{spec!r} is not `module:function` or `file.py:function`"
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            return f"{spec!r}: there is no file {place}"
    else:
        found = module_file(place)
        if found is None:
            return f"{spec!r}: there is no module {place}"
        path = found
    try:
        names = top_names(path)
    except SyntaxError as error:
        return f"{spec!r}: {path}:{error.lineno}: {error.msg}"
    if name in names or "*" in names or "__getattr__" in names:
        return ""
    from slimecli.errors import nearest

    return f"{spec!r}: {path} defines no {name!r}{nearest(name, sorted(names))}"


def module_file(dotted: str) -> Path | None:
    """The source file of a module, found without importing its parents; also looked for in the current folder."""
    first, *rest = dotted.split(".")
    spec = importlib.util.find_spec(first) if first not in sys.builtin_module_names else None
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    if not rest and spec and spec.origin and not roots:
        return Path(spec.origin)
    for root in [*roots, Path(first)]:
        base = root.joinpath(*rest)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def top_names(path: Path) -> frozenset[str]:
    """Names a file defines or imports at its top level; `*` for a star import."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            # conditional definitions count, whichever branch is taken
            names |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(names)


def annotation_fits(kind: ast.expr, value: Any, named: tuple[str, ...] = ()) -> bool:
    """Whether a recipe's value can stand where a type annotation does.

    Args:
        named: types whose values a recipe gives by name (enumerations).
    """
    if isinstance(kind, ast.Name):
        if kind.id in named:
            return isinstance(value, str)
        # True is an int to Python, and an accident in a recipe
        return isinstance(value, _KINDS.get(kind.id, ())) and (kind.id == "bool" or not isinstance(value, bool))
    if isinstance(kind, ast.Constant):
        return value is None and kind.value is None
    if not isinstance(kind, ast.Subscript):
        return False
    outer = ast.unparse(kind.value)
    inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if outer == "Literal":
        return value in [ast.literal_eval(x) for x in inner]
    if outer in ("Optional", "Union"):
        return (value is None and outer == "Optional") or any(annotation_fits(x, value, named) for x in inner)
    if outer.lower() == "list":
        return isinstance(value, list) and all(annotation_fits(inner[0], x, named) for x in value)
    return outer.lower() == "tuple" and isinstance(value, list)


def annotation_said(kind: ast.expr) -> str:
    """A type annotation as people read it."""
    text = ast.unparse(kind)
    while text.startswith("Optional["):
        text = text[len("Optional[") : -1]
    if text.startswith("Literal["):
        return "one of " + text[len("Literal[") : -1]
    return {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}.get(text, text)
