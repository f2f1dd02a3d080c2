"""The shape of a recipe's model, from wherever it is told before the run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slimecli import files, headers
from slimecli.model_specs import ModelSpec, from_config, get_spec
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir


def teacher_spec(recipe: Recipe) -> ModelSpec | None:
    """The shape of the teacher that the trainer is to hold; None: it holds none, or its folder is not here."""
    folder = Path(recipe.distill.teacher).expanduser()
    if not recipe.distill.teacher or not (folder / "config.json").is_file():
        return None
    return from_config(files.read_json(folder / "config.json"), name=folder.name)


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
