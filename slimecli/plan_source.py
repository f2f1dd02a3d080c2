"""What can be wrong with a generator of prompts and with levels of difficulty.

reasoning-gym takes seconds to import, so its files are read instead: which tasks there are, their arguments with their
types, and how many levels their curricula have. What its own checks say of a value's range is told by prepare-data.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import nearest
from slimecli.recipe import Recipe
from slimecli.recipe_sections import CurriculumSection
from slimecli.static import annotation_fits, annotation_said, module_file

OWN_ARGS = {"question": "str", "extract": "str", "partial": "bool"}
"""arguments of slime's own beside those of a task, with their types"""
_NAMED = {"bool", "int", "float", "str"}
"""annotations whose values can be told without running anything"""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym, as its file states it."""

    arguments: dict[str, ast.expr]
    """name -> annotation; `Any` where the default does not fit its own"""
    levels: int | None
    """most levels of any attribute of its curriculum; 0: it has none; None: not to be told without running it"""


def check_source(recipe: Recipe) -> Iterator[str]:
    """The task, its arguments, and the levels of the curriculum."""
    yield from _check_curriculum(recipe)
    name, _, task = recipe.data.source.partition(":")
    if name != "reasoning_gym":
        return
    path = file_of(task)
    if path is not None:
        yield from _check_arguments(recipe, task, read_task(path, task))
    elif known := known_tasks():
        yield (
            f"`data.source`: reasoning-gym has no data set {task!r}{nearest(task, known)}; all of them: "
            "`slime prepare-data --list`"
        )
    else:
        yield f"`data.source` = {recipe.data.source!r} needs reasoning-gym: pip install reasoning-gym"


def _check_arguments(recipe: Recipe, task: str, found: Task) -> Iterator[str]:
    curriculum = recipe.data.curriculum
    given = {"data.source_args": recipe.data.source_args}
    given |= {f"data.curriculum.levels[{i}]": level for i, level in enumerate(curriculum.levels)}
    for field, values in given.items():
        for name, value in values.items():
            problem = _argument_problem(found, name, value)
            if problem:
                yield f"`{field}`: {task} {problem}"
    count = curriculum.auto_levels
    if count and found.levels == 0:
        yield (
            f"`data.curriculum.auto_levels` = {count}: reasoning-gym has no curriculum for {task}; state the levels "
            "yourself in `data.curriculum.levels`"
        )
    elif found.levels and count > found.levels:
        yield f"`data.curriculum.auto_levels` = {count}, but the curriculum of {task} has {found.levels} levels"


def _argument_problem(task: Task, name: str, value: Any) -> str:
    kind = ast.Name(OWN_ARGS[name]) if name in OWN_ARGS else task.arguments.get(name)
    if kind is None:
        return (
            f"has no argument {name!r}{nearest(name, list(task.arguments))}; its arguments: "
            f"{', '.join(task.arguments)}; slime's own: {', '.join(OWN_ARGS)}"
        )
    inner = kind
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Optional":
        inner = kind.slice
    if isinstance(inner, ast.Name) and inner.id in _NAMED and not annotation_fits(inner, value):
        return f"has {name!r} = {value!r}: give {annotation_said(inner)}"
    return ""


def file_of(task: str) -> Path | None:
    """The file that registers a task."""
    for path, text in _files().items():
        if f'"{task}"' in text and task in _registered(ast.parse(text)):
            return path
    return None


def known_tasks() -> list[str]:
    """Every task; empty where reasoning-gym is not installed."""
    return sorted(name for text in _files().values() for name in _registered(ast.parse(text)))


@cache
def _files() -> dict[Path, str]:
    """Files of reasoning-gym that register tasks, with their text."""
    factory = module_file("reasoning_gym.factory")
    texts = {p: p.read_text(encoding="utf-8") for p in sorted(factory.parent.rglob("*.py"))} if factory else {}
    return {path: text for path, text in texts.items() if "\nregister_dataset(" in text}


def read_task(path: Path, task: str) -> Task:
    """What the file says of one of its tasks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    _, _, config, *curriculum = _registered(tree)[task]
    arguments = {
        node.target.id: node.annotation if _fits_itself(node) else ast.Name("Any")
        for node in classes[config].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return Task(arguments, _most_levels(classes[curriculum[0]]) if curriculum else 0)


def _fits_itself(field: ast.AnnAssign) -> bool:
    return not isinstance(field.value, ast.Constant) or annotation_fits(field.annotation, field.value.value)


def _registered(tree: ast.Module) -> dict[str, list[str]]:
    """Task -> the words of `register_dataset(name, data set, configuration[, curriculum])` at the top of a file."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        call = node.value
        if ast.unparse(call.func) == "register_dataset":
            first = call.args[0]
            name = first.value if isinstance(first, ast.Constant) else constants.get(ast.unparse(first))
            found[str(name)] = [ast.unparse(word) for word in call.args]
    return found


def _most_levels(curriculum: ast.ClassDef) -> int | None:
    """Entries of the longest `levels=` of a curriculum's attributes."""
    lengths = []
    for node in ast.walk(curriculum):
        if isinstance(node, ast.keyword) and node.arg == "levels":
            length = _length(node.value)
            if length is None:
                return None
            lengths.append(length)
    return max(lengths, default=None)


def _length(node: ast.expr) -> int | None:
    """Entries of `[a, b, ...]` or `list(range(...))`."""
    if isinstance(node, ast.List) and not any(isinstance(x, ast.Starred) for x in node.elts):
        return len(node.elts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "list" and len(node.args) == 1:
        inner = node.args[0]
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "range":
            return len(range(*(ast.literal_eval(x) for x in inner.args)))
    return None


def _check_curriculum(recipe: Recipe) -> Iterator[str]:
    curriculum = recipe.data.curriculum
    given = [name for name in ("levels", "auto_levels", "key") if getattr(curriculum, name)]
    for name in ("rate", "floor") if not given else ():
        if getattr(curriculum, name) != getattr(CurriculumSection(), name):
            yield f"`data.curriculum.{name}` has no effect without levels: set `auto_levels`, `levels` or `key`"
    if given == ["key"] and recipe.data.source and curriculum.key != "source_name":
        yield f"`data.curriculum.key` = {curriculum.key!r}: rows of `data.source` carry no such level"
    if len(given) > 1:
        yield f"`data.curriculum` has {' and '.join(given)}: keep one of them"
    if given and given[0] != "key" and not recipe.data.source:
        yield f"`data.curriculum.{given[0]}` needs `data.source`; for a file: `data.curriculum.key`"
    if given and recipe.data.mix:
        yield "`data.curriculum` and `data.mix` both decide which prompts come; keep one"
    if given and recipe.rollout.data_source:
        yield "`data.curriculum` has no effect beside `rollout.data_source`"
