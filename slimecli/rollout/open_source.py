"""The data source that a recipe asks for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from slimecli.recipe import Recipe
from slimecli.rollout.args import HookArgs
from slimecli.rollout.curriculum import LEVEL, CurriculumSource
from slimecli.rollout.file_rows import FileRows
from slimecli.rollout.own_source import own_source
from slimecli.rollout.source import BufferFilter, DataSource, PromptSource
from slimecli.rundir import RunDir
from slimecli.serving.live_collect import live_source
from slimecli.types import Group, Sample


def open_source(recipe: Recipe, run: RunDir, load: Callable[..., list[Sample]], tokenizer: Any) -> DataSource:
    """The user's own, or a walk over the run's training prompts.

    Args:
        load: (path, lines or None) -> pending samples.
    """
    section, data = recipe.rollout, recipe.data
    if section.data_source:
        encode = functools.partial(_encode, tokenizer)
        return own_source(section.data_source, HookArgs(recipe), section.n_samples_per_prompt, encode)
    if data.is_live:
        return live_source(recipe, run)
    path = run.data_dir / "train.jsonl"
    rows: Sequence[Sample] = FileRows(path, lambda at, line: load(at, [line])[0]) if data.stream else load(str(path))
    pick = _buffer_filter(section.buffer_filter, HookArgs(recipe)) if section.buffer_filter else None
    if data.curriculum.is_on:
        return CurriculumSource(
            rows,
            section.n_samples_per_prompt,
            seed=recipe.seed,
            shuffle=data.shuffle,
            levels=_names(rows, data.metadata_key, data.curriculum.key or LEVEL),
            section=data.curriculum,
            reward_key=recipe.reward.key or None,
            pick=pick,
        )
    return PromptSource(
        rows,
        section.n_samples_per_prompt,
        seed=recipe.seed,
        shuffle=data.shuffle,
        mix=data.mix,
        sources=_names(rows, data.metadata_key, "source_name") if data.mix else (),
        pick=pick,
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _names(rows: Sequence[Sample], metadata_key: str, name: str) -> list[str]:
    """metadata[name] of every row; of a file that is streamed, without making samples of its lines."""
    if isinstance(rows, FileRows):
        found = ((json.loads(line).get(metadata_key) or {}) for line in rows.lines())
        return [str(metadata.get(name, "")) for metadata in found]
    return [str(row.metadata.get(name, "")) for row in rows]


def _buffer_filter(path: str, args: HookArgs) -> BufferFilter:
    """A function with slime's signature (args, rollout_id, buffer, num_samples)."""
    from slimecli.data_tools.hooks import load_hook

    hook = load_hook(path, ("args", "rollout_id", "buffer", "num_samples"))

    def pick(buffer: list[Group], wanted: int) -> list[Group]:
        groups: list[Group] = hook(args, None, buffer, wanted)
        return groups

    return pick
