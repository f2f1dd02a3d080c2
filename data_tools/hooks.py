"""Functions that the user names on the command line or in a recipe: `pkg.module.fn`, `pkg.module:fn`, `file.py:fn`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slimecli import compat
from slimecli.errors import UsageError, nearest
from slimecli.static import module_file

_FORMS = "write `file.py:function`, `package.module:function` or `package.module.function`"


def load_hook(path: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """Import a user's function and check that it can be called with these positional parameters.

    Args:
        path: one of the three forms above.
        parameters: names of what it will be given, in order; for the check and for the error text.
    """
    function = load_object(path)
    if not callable(function):
        raise UsageError(f"{path!r} is a {type(function).__name__}, not a function", _FORMS)
    _check_signature(function, path, parameters)
    hook: Callable[..., Any] = compat.as_hook(function)
    return hook


def load_object(path: str) -> Any:
    """Import whatever a user's path names, in one of the three forms above."""
    module_name, name = _split(path)
    module = _load_file(Path(module_name), path) if module_name.endswith(".py") else _load_module(module_name, path)
    names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    if not hasattr(module, name):
        raise UsageError(
            f"{path!r}: {module_name} has no {name!r}{nearest(name, names)}",
            f"it defines: {', '.join(names) or 'nothing callable'}",
        )
    return getattr(module, name)


def _split(path: str) -> tuple[str, str]:
    left, colon, right = path.rpartition(":")
    if not colon:
        left, _, right = path.rpartition(".")
    if not left or not right.isidentifier() or (not colon and right == "py"):
        raise UsageError(f"{path!r} does not name a function", _FORMS)
    return left, right


def _load_file(file: Path, path: str) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise UsageError(f"{path!r}: no file {file}", "check the path; it is relative to the current folder")
    # one module per file, so that two hooks of one file share its state
    name = f"slime_hook_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        return _execute(name, file, as_plugin=compat.needs_slime(file))
    except Exception as error:
        if not compat.lacks_slime(error):
            raise _import_failed(path, error) from error
    try:
        return _execute(name, file, as_plugin=True)
    except Exception as error:
        raise _import_failed(path, error) from error


def _execute(name: str, file: Path, *, as_plugin: bool) -> ModuleType:
    """Run a file as a new module; one that fails is not kept."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if as_plugin:
            compat.run_as_plugin(module, file)
        else:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str, path: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not search the current folder, `python -m` does
        sys.path.append(here)
    try:
        return _import(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise _import_failed(path, error) from error
        raise UsageError(
            f"{path!r}: no module {error.name!r}", f"install it, run from the folder that holds it, or {_FORMS}"
        ) from error
    except Exception as error:
        raise _import_failed(path, error) from error


def _import(name: str) -> ModuleType:
    """Import a module, as a plugin where it is written for slime."""
    file = module_file(name)
    if file is None or not compat.needs_slime(file):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if file is None or not compat.lacks_slime(error):
                raise
    with compat.plugin_imports(file):
        return importlib.import_module(name)


def _import_failed(path: str, error: Exception) -> UsageError:
    return UsageError(f"{path!r} cannot be imported: {type(error).__name__}: {error}", "mend it; --debug shows where")


def _check_signature(function: Callable[..., Any], path: str, parameters: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have none; the first call decides
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise UsageError(
            f"{path!r} has the signature {signature}, but it is called with ({', '.join(parameters)}): {error}",
            f"define it as `def {path.rpartition(':')[2].rpartition('.')[2]}({', '.join(parameters)}, **kwargs)`",
        ) from None
