"""The shape of a recipe's model, from wherever it is told before the run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from slimecli import files, headers
from slimecli.errors import SlimeError
from slimecli.frozen import frozen_checkpoints, frozen_copy, frozen_paths
from slimecli.model_specs import ModelSpec, from_config, get_spec
from slimecli.model_specs.counts import BYTES
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""files of which transformers needs one to make a tokenizer"""


def teacher_spec(recipe: Recipe) -> ModelSpec | None:
    """The shape of the teacher that the trainer is to hold; None: it holds none, or its folder is not here."""
    folder = Path(recipe.distill.teacher).expanduser()
    config = headers.config_folder(folder) / "config.json"
    if not recipe.distill.teacher or not config.is_file():
        return None
    return from_config(files.read_json(config), name=folder.name)


def folder_problems(path: str, *, has_tokenizer: bool, has_weights: bool = True) -> Iterator[str]:
    """What a local model folder, HF's or Megatron's, lacks of what is taken from it.

    Args:
        has_tokenizer: a tokenizer is taken.
        has_weights: weights are taken; those of Megatron's files are read with torch, and not looked at here.
    """
    folder = Path(path).expanduser()
    beside, is_megatrons = headers.config_folder(folder), headers.is_torch_dist(folder)
    if not (beside / "config.json").is_file():
        yield "there is no config.json" + "; put it into its folder hf" * is_megatrons
        return
    if has_tokenizer and not any((beside / name).is_file() for name in TOKENIZERS):
        yield f"there is no tokenizer ({', '.join(TOKENIZERS)}); put the model's own tokenizer files there"
    if not has_weights or is_megatrons:
        return
    try:
        index = headers.read_index(folder)
        for shard in headers.shard_paths(folder, None if index is None else index.values()):
            headers.read_header(shard)
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"


def frozen_problems(path: str, *, has_weights: bool) -> Iterator[str]:
    """The same of a frozen model; a Megatron checkpoint must be of a family that can be converted as well.

    Args:
        has_weights: slime itself loads them; other servers may read more formats.
    """
    yield from (found := list(folder_problems(path, has_tokenizer=False, has_weights=has_weights)))
    folder = Path(path).expanduser()
    if found or not headers.is_torch_dist(folder):
        return
    try:
        from_config(files.read_json(headers.config_folder(folder) / "config.json"), name=folder.name)
    except SlimeError as error:
        yield f"{error.what}; {error.fix}"


def copies_bytes(recipe: Recipe, run: RunDir | None) -> int:
    """What the run's copies of frozen Megatron checkpoints take (bytes), in the dtype that their config names."""
    copies = {role: frozen_copy(run, role, path) for role, path in frozen_paths(recipe).items()} if run else {}
    folders = {role: Path(path).expanduser() for role, path in frozen_checkpoints(recipe).items()}
    total = 0
    for folder in (folders | {role: copy for role, copy in copies.items() if copy}).values():
        config = files.read_json(headers.config_folder(folder) / "config.json")
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        total += from_config(config, name=folder.name).weight_bytes(dtype if dtype in BYTES else "bfloat16")
    return total


def model_spec(recipe: Recipe, run: RunDir | None) -> ModelSpec:
    """The shape of the recipe's model, from the run's own copy, a local config.json or the registry.

    Raises SlimeError when none of them tells.
    """
    model = recipe.model
    folders = [run.model_dir] if run is not None else []
    folders += [Path(model.path).expanduser()] if model.path else []
    for folder in folders:
        config = headers.config_folder(folder) / "config.json"
        if config.is_file():
            return from_config(files.read_json(config), name=model.name or folder.name)
    spec = get_spec(model.name)
    return dataclasses.replace(spec, vocab=model.tokenizer_vocab) if model.tokenizer_vocab else spec
