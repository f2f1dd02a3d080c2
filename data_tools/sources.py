"""Generators of prompts. SOURCES: name -> function(task, args, seed) that yields rows for ever or until exhausted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

from slimecli.data_tools.formats import Row
from slimecli.errors import DataError, UsageError, nearest
from slimecli.lookup import look_up
from slimecli.recipe_sections import DataSection

SOURCES: dict[str, str] = {"reasoning_gym": "slimecli.data_tools.sources:reasoning_gym_rows"}
"""name -> function; `data.source = "name:task"`"""

Source = Callable[[str, dict[str, Any], int], Iterator[Row]]

_OWN_ARGS = ("question", "extract", "partial")


def open_source(source: str, args: dict[str, Any], seed: int) -> Iterator[Row]:
    """Rows of `name:task`: {"prompt", "label", "metadata"}."""
    name, _, task = source.partition(":")
    function: Source = look_up(SOURCES, name, "data source", "sources: {known}; write NAME:TASK")
    return function(task, args, seed)


def level_args(section: DataSection) -> list[dict[str, Any]]:
    """Arguments of the generator level by level, the easiest first; [] where the recipe has no such levels."""
    curriculum = section.curriculum
    if curriculum.levels:
        return [section.source_args | level for level in curriculum.levels]
    if curriculum.auto_levels:
        _, _, task = section.source.partition(":")
        return [section.source_args | level for level in _own_levels(task, curriculum.auto_levels)]
    return []


def _own_levels(task: str, count: int) -> list[dict[str, Any]]:
    """What changes from level to level in reasoning-gym's curriculum for a task."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if task not in CURRICULA:
        raise UsageError(
            f"reasoning-gym has no curriculum for {task!r}", "state the levels yourself: data.curriculum.levels"
        )
    own = create_curriculum(task)
    most = max(len(attribute.levels) for attribute in own.attributes.values())
    if count > most:
        raise UsageError(
            f"data.curriculum.auto_levels = {count}, but the curriculum of {task} has {most} levels",
            f"--set data.curriculum.auto_levels={most}",
        )
    configs = []
    for level in range(count):
        for name, attribute in own.attributes.items():
            own.set_attr_level(name, min(level, len(attribute.levels) - 1))
        configs.append(json.loads(json.dumps(asdict(own.generate_configuration()))))
    varying = [k for k in configs[0] if any(c[k] != configs[0][k] for c in configs)]
    return [{k: config[k] for k in varying} for config in configs]


def reasoning_gym_rows(task: str, args: dict[str, Any], seed: int) -> Iterator[Row]:
    """Procedural tasks of the reasoning-gym package, for ever.

    Args:
        task: data set name, e.g. "basic_arithmetic".
        args: the data set's own configuration, plus `question`: prompt template over the entry's question, answer and
            metadata, e.g. "{expression} ="; `extract`: how the scorer finds the answer in a response (see
            rewards/extract.py); `partial`: keep scores below 1 instead of cutting them to 0.
        seed: seed of the data set; item i is drawn from seed + i.
    """
    own = {k: args[k] for k in _OWN_ARGS if k in args}
    dataset = _dataset(task, {k: v for k, v in args.items() if k not in _OWN_ARGS}, seed)
    index = 0
    while True:
        yield _row(task, dataset[index], own)
        index += 1


def _dataset(task: str, config: dict[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UsageError(
            f"reasoning-gym has no data set {task!r}{nearest(task, list(DATASETS))}", "`slime prepare-data --list`"
        )
    known = [f.name for f in fields(DATASETS[task][1])]
    for key in config:
        if key not in known:
            raise UsageError(
                f"data.source_args: {task} has no argument {key!r}{nearest(key, known)}",
                f"its arguments: {', '.join(known)}; slime's own: {', '.join(_OWN_ARGS)}",
            )
    try:
        return reasoning_gym.create_dataset(task, **{**config, "seed": seed})
    except (AssertionError, ValueError, TypeError) as error:
        raise UsageError(f"data.source_args for {task}: {error}", "correct the value") from error


def _row(task: str, entry: dict[str, Any], own: dict[str, Any]) -> Row:
    try:
        stored = json.loads(json.dumps({k: entry[k] for k in ("question", "answer", "metadata")}))
    except TypeError as error:
        raise DataError(f"entries of reasoning-gym's {task} are not JSON: {error}", "choose another data set") from None
    values = {**stored["metadata"], "question": stored["question"], "answer": stored["answer"]}
    template = own.get("question", "{question}")
    try:
        prompt = template.format_map(values)
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"data.source_args.question = {template!r} does not fit: {error}", f"fields: {', '.join(sorted(values))}"
        ) from None
    metadata = {"source_name": task, "reasoning_gym": {"dataset": task, "entry": stored}}
    metadata |= {k: own[k] for k in ("extract", "partial") if k in own}
    return {"prompt": prompt, "label": stored["answer"], "metadata": metadata}


def list_tasks() -> list[str]:
    """`name:task` of everything that can be generated here."""
    import reasoning_gym  # noqa: F401 - registers every data set
    from reasoning_gym.factory import DATASETS

    return [f"reasoning_gym:{task}" for task in sorted(DATASETS)]
