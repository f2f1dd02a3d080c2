"""Files written for slime run here unmodified: their imports of `slime...` find slimecli's own parts.

This holds for such a file alone. It is run with an `__import__` of its own (statements inside its functions, which run
at any later time, use it as well), and so are the modules that it imports from its own folder and from the current one.
No module named `slime` appears in sys.modules, other files are not touched, and a slime that is really installed is
never hidden: then the file gets that.

What there is of slime is listed in slimecli.shim.SURFACE; everything else is an ImportError that says so.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = "slime"
plugins: set[str] = set()
"""names of the modules that were run in this way"""
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})


def slime_is_installed() -> bool:
    """Whether there is a real slime: a package with code, not a folder that happens to have the name."""
    spec = importlib.util.find_spec(ROOT)
    if spec is None:
        return False
    places = [Path(p) for p in spec.submodule_search_locations or []]
    return spec.origin is not None or any((place / "utils" / "types.py").is_file() for place in places)


def needs_slime(file: Path) -> bool:
    """Whether a source file imports slime anywhere, and there is no real one."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False  # loading it tells what is wrong
    named = (name for node in ast.walk(tree) for name in _imported(node))
    return any(_is_slime(name) for name in named) and not slime_is_installed()


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def _is_slime(name: str | None) -> bool:
    return name == ROOT or (name or "").startswith(f"{ROOT}.")


def lacks_slime(error: Exception) -> bool:
    """Whether an import failed because there is no slime: a module beside the file needs it."""
    return isinstance(error, ModuleNotFoundError) and _is_slime(error.name) and not slime_is_installed()


def run_as_plugin(module: ModuleType, file: Path) -> None:
    """Execute a module made for a slime plugin file."""
    finder = _Finder((file.parent, Path.cwd()))
    assert module.__spec__ is not None
    module.__spec__.loader = _Loader(module.__name__, str(file), finder)
    with finder.active():
        module.__spec__.loader.exec_module(module)


@contextlib.contextmanager
def plugin_imports(file: Path) -> Iterator[None]:
    """While it is open, a module of the file's folder or of the current one is imported as a slime plugin."""
    with _Finder((file.parent, Path.cwd())).active():
        yield


class _Loader(SourceFileLoader):
    """Runs a file with an `__import__` of its own."""

    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        """Execute the code; functions keep the builtins that the module has now."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._finder.import_}
        plugins.add(module.__name__)
        super().exec_module(module)


class _Finder:
    """Finds the modules beside a plugin, and has them run as plugins too.

    Args:
        folders: where such modules may lie; the first one is searched even where sys.path does not have it.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While it is open, imports ask here first."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a source file in our folders; everything else is left to Python."""
        if name.partition(".")[0] in sys.stdlib_module_names or name.startswith("slimecli"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None and path is None:
            spec = PathFinder.find_spec(name, [str(self._folders[0])])
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or not self._is_ours(spec.origin or ""):
            return None
        spec.loader = _Loader(name, spec.loader.path, self)
        return spec

    def _is_ours(self, origin: str) -> bool:
        file = Path(origin).resolve()
        in_library = any(file.is_relative_to(folder) for folder in _LIBRARIES)
        return not in_library and any(file.is_relative_to(folder) for folder in self._folders)

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        """`__import__` of a plugin."""
        if level == 0 and _is_slime(name):
            from slimecli.shim import offered

            return offered(name, fromlist or ())
        if level == 0 and name in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self.active():
            return builtins.__import__(name, globals, locals, fromlist, level)


def as_hook(function: Any) -> Any:
    """A function of a plugin as slimecli calls it: its samples offer what slime's do; others are left as they are."""
    if getattr(function, "__module__", None) not in plugins:
        return function
    from slimecli.shim.calls import adapted

    return adapted(function)
