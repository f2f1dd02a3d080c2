"""Which code scores: a hash over the files of the scorers that are used, and over what they import from data_tools."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from slimecli.data_tools.rewards import REWARDS
from slimecli.recipe_reward import RewardSection
from slimecli.static import module_file

_PACKAGE = "slimecli.data_tools."


def scorer_version(section: RewardSection, kinds: set[str]) -> str:
    """Twelve hexadecimal digits that change when the code of a scorer does.

    Args:
        section: names the scorer, and for a mix or a tournament further ones.
        kinds: scorers that rows name themselves (metadata.rm_type).
    """
    named = {section.path or section.type, *kinds}
    if section.type == "mix":
        named |= set(section.mix)
    if section.type == "tournament":
        named.add(section.tournament.compare)
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name}\0{_code_of(name)}\0".encode())
    return digest.hexdigest()[:12]


def hook_version(path: str) -> str:
    """Hash of the file of a user's function; empty where it cannot be found, which is told when it is loaded."""
    place, colon, _ = path.rpartition(":")
    place = place if colon else path.rpartition(".")[0]
    file = Path(place).expanduser() if place.endswith(".py") else module_file(place) if place else None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file is not None and file.is_file() else ""


def _code_of(name: str) -> str:
    base = name.removeprefix("boxed_")
    if base not in REWARDS:
        return hook_version(name)
    digest = hashlib.sha256()
    for module in sorted(_needed(REWARDS[base].partition(":")[0], set())):
        file = module_file(module)
        digest.update(file.read_bytes() if file is not None else module.encode())
    return digest.hexdigest()


def _needed(module: str, seen: set[str]) -> set[str]:
    """The module and those of data_tools that it imports anywhere; the package of scorers itself only dispatches."""
    seen.add(module)
    file = module_file(module)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file is not None else ():
        target = node.module if isinstance(node, ast.ImportFrom) else None
        if target and target.startswith(_PACKAGE) and target != "slimecli.data_tools.rewards" and target not in seen:
            _needed(target, seen)
    return seen
