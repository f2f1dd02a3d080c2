"""The project's own Python files, each once under its real path."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("slimecli", "commands", "model_specs", "data_tools")
LINKED = ("commands", "model_specs", "data_tools")


def library_files() -> list[Path]:
    """Every file of the installed package; the symlinked folders under their real path."""
    found = [p for folder in FOLDERS for p in _walk(ROOT / folder)]
    return sorted(found)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


def module_name(path: Path) -> str:
    """slimecli.x.y of a library file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "slimecli" else ("slimecli", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def top_imports(path: Path) -> list[str]:
    """Modules imported when this file is imported; a TYPE_CHECKING block is not."""
    found: list[str] = []
    _collect(tree_of(path).body, found)
    return found


def _collect(body: list[ast.stmt], found: list[str]) -> None:
    for node in body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found.append(module)
            # `from slimecli import files` imports slimecli.files
            found += [f"{module}.{a.name}" for a in node.names if module == "slimecli"]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            _collect(node.body + node.orelse, found)
        elif isinstance(node, ast.Try):
            _collect(node.body + node.orelse + node.finalbody + [s for h in node.handlers for s in h.body], found)
        elif isinstance(node, ast.ClassDef | ast.With):
            _collect(node.body, found)
