"""Which router programs there are on this machine, and which arguments they take: their own help says so."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli import env
from slimecli.errors import RecipeError, SlimeError, nearest

MODULES = {"builtin": "slimecli.engines.router", "smg": "smg", "sglang": "sglang_router.launch_router"}
"""engine.router -> the module that is run"""
PACKAGES = {"smg": "smg", "sglang": "sglang-router"}
"""engine.router -> what pip calls it, and its script's name"""
HELP_S = 60.0
"""deadline of a program's `--help` (seconds)"""
OWN = ("host", "port", "worker-urls", "parent")
"""arguments that slime sets itself"""
_OPTION = re.compile(r"^  (?:-\w(?: \S+)?, )?(--[a-z0-9][\w-]*.*?)(?:  .*)?$")


@dataclass(frozen=True)
class Argument:
    """One argument of a program."""

    is_flag: bool
    """takes no value"""
    choices: tuple[str, ...] = ()


def find(name: str) -> list[str] | None:
    """The command that starts a router program, or None where it is not installed."""
    module = MODULES[name]
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:  # a mere folder of that name is no installed program
        return [sys.executable, "-m", module, *(["launch"] if name == "smg" else [])]
    script = shutil.which(PACKAGES[name])
    return [script, "launch"] if script and _belongs_to(script, package) else None


def _belongs_to(script: str, package: str) -> bool:
    """Whether a script on PATH is this package's: sglang-router brings one that is called smg, too."""
    others = {m.partition(".")[0] for m in MODULES.values()} - {package}
    with Path(script).open("rb") as file:
        text = file.read(4096)
    return not any(f"from {other}".encode() in text for other in others)


def command(name: str) -> list[str]:
    """The command that starts a router program, which must be there."""
    found = find(name)
    if found is None:
        package = PACKAGES[name]
        raise SlimeError(
            f"engine.router = {name!r}, but {package} is not installed",
            f'pip install {package}, or --set engine.router="builtin"',
        )
    return found


@functools.cache
def arguments(name: str) -> dict[str, Argument]:
    """Every argument of an installed program, without the leading dashes."""
    line = [*command(name), "--help"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=HELP_S, env=env.child_env(COLUMNS="200"))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlimeError(f"{name} does not tell its arguments: {error}", f"install {name} again") from None
    if done.returncode != 0:
        raise SlimeError(f"{' '.join(line)} failed: {done.stderr[-300:]}", f"install {name} again")
    return parse_help(done.stdout)


def parse_help(text: str) -> dict[str, Argument]:
    """Arguments as argparse's help shows them."""
    found: dict[str, Argument] = {}
    for line in text.splitlines():
        match = _OPTION.match(line)
        for option in match.group(1).split(", --") if match else ():
            word, _, value = option.removeprefix("--").partition(" ")
            listed = re.search(r"\{([^}]*)\}", value)
            choices = tuple(listed.group(1).split(",")) if listed else ()
            found[word] = Argument(is_flag=not value.strip(), choices=choices)
    found.pop("help", None)
    return found


def words(name: str, given: Mapping[str, Any]) -> list[str]:
    """The [router] table as a command line. Raises RecipeError naming every entry that the program does not know."""
    known = arguments(name)
    problems, line = [], []
    for key, value in given.items():
        option = key.replace("_", "-")
        argument = known.get(option)
        if option in OWN:
            problems.append(f"`router.{key}`: slime sets this itself")
        elif argument is None:
            problems.append(f"`router.{key}` is no argument of {name}{nearest(option, sorted(known))}")
        elif (wrong := _wrong(argument, value)) is not None:
            problems.append(f"`router.{key}` = {value!r}: {wrong}")
        elif argument.is_flag:
            line += [f"--{option}"] if value else []
        else:
            values = value if isinstance(value, list) else [value]
            line += [f"--{option}", *(str(v) for v in values)]
    if problems:
        raise RecipeError(problems, source="[router]")
    return line


def _wrong(argument: Argument, value: Any) -> str | None:
    """What is wrong with a value; whether it is a number of the right size, the program says at its start."""
    if argument.is_flag and not isinstance(value, bool):
        return "this is a switch; true or false"
    if not argument.is_flag and isinstance(value, bool):
        return "this needs a value"
    if argument.choices and str(value) not in argument.choices:
        return f"must be one of {', '.join(argument.choices)}{nearest(str(value), list(argument.choices))}"
    return None
