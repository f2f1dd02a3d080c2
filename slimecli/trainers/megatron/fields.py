"""The arguments that the installed megatron-core takes, by name and type.

Read from its source: neither torch nor Megatron is imported, so `slime plan` can do it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import UsageError
from slimecli.static import annotation_fits, annotation_said

_SOURCES = {
    "transformer": (
        ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ("model_parallel_config.py", ("ModelParallelConfig",)),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),),
    "optimizer": (("optimizer/optimizer_config.py", ("OptimizerConfig",)),),
}
"""part of Settings -> the dataclasses of megatron-core that its arguments go to"""
_NAMED = ("AttnBackend", "CudaGraphScope", "PipelineParallelLayerLayout")
"""enumerations of megatron-core; a recipe gives the name"""


@cache
def known_fields() -> Mapping[str, Mapping[str, ast.expr]]:
    """Part of Settings -> field -> its type, as written."""
    root = megatron_folder()
    out: dict[str, dict[str, ast.expr]] = {}
    for part, sources in _SOURCES.items():
        out[part] = {}
        for file, classes in sources:
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name in classes]
            for node in (n for body in bodies for n in body if isinstance(n, ast.AnnAssign)):
                if isinstance(node.target, ast.Name):
                    out[part][node.target.id] = node.annotation
    return out


def megatron_folder() -> Path:
    """Where the installed megatron-core lies."""
    found = importlib.util.find_spec("megatron")
    for place in found.submodule_search_locations or () if found else ():
        if (Path(place) / "core" / "model_parallel_config.py").is_file():
            return Path(place) / "core"
    raise UsageError("trainer.backend = 'megatron': megatron-core is not installed", 'pip install "slimecli[megatron]"')


def type_problem(name: str, value: Any) -> str:
    """Why a value cannot be that of a field; empty if it can, or if no such field is known."""
    kinds = _kinds(name)
    if not kinds or any(annotation_fits(kind, value, _NAMED) for kind in kinds):
        names = _enumerated(kinds[0]) if kinds else ()
        wrong = bool(names) and value not in names
        return f"[megatron] {name} = {value!r}: it takes one of {', '.join(names)}" if wrong else ""
    if takes_object(name):
        return f"[megatron] {name} takes a Python object, which no recipe can give"
    return f"[megatron] {name} = {value!r}: it takes {annotation_said(kinds[0])}"


def takes_object(name: str) -> bool:
    """Whether a field takes a Python object, which no recipe can give."""
    kinds = _kinds(name)
    return bool(kinds) and all(_is_object(kind) for kind in kinds)


def _kinds(name: str) -> list[ast.expr]:
    """The types of a field in all parts that have it."""
    return [fields[name] for fields in known_fields().values() if name in fields]


def _enumerated(kind: ast.expr) -> tuple[str, ...]:
    """The names that an enumeration of megatron-core has; empty where a type is none, or more than one."""
    if not isinstance(kind, ast.Name) or kind.id not in _NAMED:
        return ()
    tree = ast.parse((megatron_folder() / "transformer" / "enums.py").read_text(encoding="utf-8"))
    bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.id]
    assigned = [n.targets[0] for body in bodies for n in body if isinstance(n, ast.Assign)]
    return tuple(t.id for t in assigned if isinstance(t, ast.Name))


def _is_object(kind: ast.expr) -> bool:
    return any(word in ast.unparse(kind) for word in ("Callable", "dtype", "ContextManager", "RecipeConfig"))
