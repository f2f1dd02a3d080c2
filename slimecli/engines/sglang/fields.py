"""The command-line arguments that an installed SGLang takes, by name and type.

SGLang may live in another Python environment than slime, with another torch. Its source is read, never imported, so
that `slime plan` can do it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slimecli.errors import UsageError

_PROBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = ""
print(json.dumps([places, version]))
"""
"""runs in the other environment; finds the package without importing it"""
PROBE_S = 60.0
"""deadline of that (seconds)"""
INSTALL = "python3 bootstrap.py sglang makes an environment with it; then --set engine.python=.venv-sglang/bin/python"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """SGLang in a Python environment."""

    python: str
    """its interpreter"""
    folder: Path
    """the package `sglang`"""
    version: str


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of the server."""

    name: str
    """field of ServerArgs"""
    flag: str
    """as it stands on the command line"""
    aliases: tuple[str, ...] = ()
    """other spellings, without dashes in front, with underscores"""
    kind: ast.expr
    """its type, as written"""
    one_word: bool = False
    """a list or table goes over as one word of JSON"""
    switch: str = ""
    """`on`: the bare flag says true; `on/off`: false is said as --no-...; empty: it takes a value"""


def installation(python: str = "") -> Installation:
    """SGLang as an interpreter finds it (empty: the one that runs slime)."""
    # links are kept: by that path an interpreter knows its environment
    return _installation(str(Path(python).expanduser().absolute()) if python else sys.executable)


@cache
def _installation(python: str) -> Installation:
    if not Path(python).is_file():
        raise UsageError(f"engine.python = {python!r}: there is no such file", INSTALL)
    places, version = _looked_up(python)
    for place in places:
        if (Path(place) / "srt" / "server_args.py").is_file():
            return Installation(python=python, folder=Path(place), version=version)
    raise UsageError(f"engine.backend = 'sglang': {python} has no SGLang", INSTALL)


def _looked_up(python: str) -> tuple[list[str], str]:
    """(folders of the package, its version) as an interpreter says them."""
    try:
        # from the root folder: an unrelated folder named sglang in the current one must not be found
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, cwd="/", timeout=PROBE_S)
        if done.returncode:
            raise UsageError(f"engine.python = {python!r} does not run: {done.stderr.strip()[-200:]}", INSTALL)
        places, version = json.loads(done.stdout)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"engine.python = {python!r} is no Python that answers: {error}", INSTALL) from None
    return places, version


@cache
def known_arguments(folder: Path) -> Mapping[str, Argument]:
    """Field -> argument, for everything that SGLang's command line offers."""
    found: dict[str, Argument] = {}
    for path in (folder / "srt" / "server_args.py", *sorted(folder.glob("srt/arg_groups/fields/*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for body in (n.body for n in tree.body if isinstance(n, ast.ClassDef) and _holds_fields(n, path)):
            for node in body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    argument = _argument(node.target.id, node.annotation, older=path.name == "server_args.py")
                    found |= {argument.name: argument} if argument else {}
        if path.name == "server_args.py":
            found |= {a.name: a for a in _registered(tree)}
    return found


def _holds_fields(node: ast.ClassDef, path: Path) -> bool:
    """ServerArgs itself, or (since 0.5.21) one of the classes that it is put together from."""
    return node.name == "ServerArgs" or path.parent.name == "fields"


def _argument(name: str, annotation: ast.expr, *, older: bool) -> Argument | None:
    """From `name: A[T, "help"]`, `name: A[T, Arg(...)]`, or in older versions `name: T`; None if it has no flag."""
    kind: ast.expr = annotation
    notes: dict[str | None, ast.expr] = {}
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *rest = annotation.slice.elts
        notes = {k.arg: k.value for call in rest if isinstance(call, ast.Call) for k in call.keywords}
    elif not older:
        return None
    if name.startswith("_") or "Callable" in ast.unparse(kind) or "no_cli" in notes:
        return None
    flag = str(ast.literal_eval(notes["cli_name"])) if "cli_name" in notes else "--" + name.replace("_", "-")
    others = [flag, *(ast.literal_eval(notes["aliases"]) if "aliases" in notes else [])]
    action = ast.unparse(notes["action"]) if "action" in notes else ""
    plain = ast.unparse(kind).removeprefix("Optional[").removesuffix("]")
    switch = "on/off" if "BooleanOptional" in action else "on" if plain == "bool" and not action else ""
    aliases = tuple(a for other in others if (a := argument_name(other)) != name)
    return Argument(name=name, flag=flag, aliases=aliases, kind=kind, one_word="type_parser" in notes, switch=switch)


def _registered(tree: ast.Module) -> Iterator[Argument]:
    """Arguments that the class adds by hand: parser.add_argument("--name", ...)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "parser.add_argument" or not node.args:
            continue
        words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if not words or not words[0].startswith("--"):
            continue
        notes = {k.arg: k.value for k in node.keywords}
        action = ast.unparse(notes["action"]) if "action" in notes else ""
        switch = "on" if "store_true" in action.lower() or "StoreTrue" in action else ""
        kind = ast.Name("bool" if switch else "str")
        # of several spellings, the field's is the first or stands in `dest`
        name = str(ast.literal_eval(notes["dest"])) if "dest" in notes else argument_name(words[0])
        aliases = tuple(a for word in words if (a := argument_name(word)) != name)
        several = "nargs" in notes
        kind_of_list = ast.Subscript(ast.Name("List"), ast.Name("str"))
        yield Argument(name=name, flag=words[0], aliases=aliases, kind=kind_of_list if several else kind, switch=switch)


def argument_name(flag: str) -> str:
    """`--tp-size`, `tp-size` -> `tp_size`."""
    return flag.removeprefix("--").replace("-", "_")
