"""The stages of `slime run`, in order: what each is made from, what it leaves, and the command that does it alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slimecli.errors import UsageError
from slimecli.frozen import frozen_checkpoints
from slimecli.recipe import Recipe
from slimecli.recipe_algo import AlgoSection, DistillSection
from slimecli.recipe_sections import Section
from slimecli.rundir import RunDir
from slimecli.stage import Stage
from slimecli.trainers.megatron.layout import SIZES, field_name, without_layout


def sft_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the SFT stage: the same loop, one demonstration per group, its own optimizer numbers."""
    sft = recipe.sft
    changes: dict[str, dict[str, Any]] = {
        "rollout": {
            "batch_size": sft.batch_size,
            "n_samples_per_prompt": 1,
            "temperature": 1.0,
            "dynamic_filter": "",
            "max_staleness": 0,
            "fully_async": False,
        },
        "sync": {"interval": 1},
        "trainer": {
            "global_batch_size": sft.batch_size,
            "steps_per_rollout": 1,
            "lr": sft.lr,
            "warmup_steps": sft.warmup_steps,
            "lr_schedule": sft.lr_schedule,
            "min_lr_ratio": sft.min_lr_ratio,
        },
        "eval": {"interval": 0},
        "sft": {"steps": 0},
        "checkpoint": {"interval": max(recipe.checkpoint.interval, -(-sft.steps // 4)), "keep": 1},
    }
    sections: dict[str, Section] = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()
    }
    sections |= {"algo": AlgoSection(name="sft", aggregation="token"), "distill": DistillSection()}
    return recipe.model_copy(update={**sections, "steps": sft.steps, "title": "SFT stage"})


def _dump(recipe: Recipe, *sections: str) -> dict[str, Any]:
    tree = recipe.model_dump(mode="json")
    return {name: tree[name] for name in (*sections, "seed")}


LAYOUT_ONLY = (
    "processes",
    "threads",
    "max_tokens_per_micro_batch",
    "activation_checkpointing",
    "logits_chunk_tokens",
    "shared_prefix",
)
"""trainer values that move sums to other places, and change no result beyond rounding"""


def trainer_layout(recipe: Recipe) -> dict[str, Any]:
    """Who trains, and how the model is divided. Another layout changes sums in their last digits."""
    sizes = {field_name(k): v for k, v in recipe.megatron.items() if field_name(k) in SIZES}
    return {"backend": recipe.trainer.backend, "processes": recipe.trainer.processes, **sizes}


def layout_change(recipe: Recipe, manifest: Mapping[str, Any]) -> str:
    """What a person should know where a checkpoint of another layout is continued; empty: it is the same.

    Raises UsageError where another backend wrote it: optimizer states do not pass between them.
    """
    now = trainer_layout(recipe)
    then = manifest.get("trainer", now)
    if then["backend"] != now["backend"]:
        raise UsageError(
            f"step {manifest['step']} was trained with trainer.backend = {then['backend']!r}, whose optimizer state "
            f"{now['backend']!r} cannot take over",
            f"--set trainer.backend={then['backend']}, or start a new run from the weights of that step",
        )
    said = [", ".join(f"{k} {v}" for k, v in x.items() if k != "backend") for x in (then, now)]
    return "" if then == now else f"the trainer goes on at {said[1]} (before: {said[0]}): the same up to rounding"


def _data_inputs(recipe: Recipe) -> dict[str, Any]:
    """The data section, but for how many processes read it."""
    data = recipe.data.model_dump(mode="json", exclude={"workers"})
    model = recipe.model.name or recipe.model.path
    return {"data": data, "seed": recipe.seed, "sft_data": recipe.sft.data, "model": model}


def _sft_inputs(recipe: Recipe) -> dict[str, Any]:
    """The SFT section, and what SFT takes from the trainer's: its optimizer is the same."""
    trainer = sft_recipe(recipe).trainer.model_dump(mode="json", exclude=set(LAYOUT_ONLY))
    return {**_dump(recipe, "sft"), "trainer": trainer, "megatron": without_layout(recipe.megatron)}


def _loop_inputs(recipe: Recipe) -> dict[str, Any]:
    sections = ("rollout", "reward", "algo", "distill", "trainer", "eval")
    numbers = {"steps": recipe.steps, "sync_interval": recipe.sync.interval}
    return {**_dump(recipe, *sections), **numbers, "megatron": recipe.megatron, "sglang": recipe.sglang}


def training_inputs(recipe: Recipe) -> str:
    """Hash of everything that the RL or SFT steps of a run depend on; a checkpoint carries that of its last step."""
    text = json.dumps(_loop_inputs(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


PIPELINE: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="data",
            inputs=_data_inputs,
            outputs=lambda run, r: [run.data_dir],
            command=lambda run: f"slime prepare-data --run {run.quoted}",
        ),
        Stage(
            name="model",
            needs=("data",),
            inputs=lambda r: _dump(r, "model"),
            outputs=lambda run, r: [run.model_dir],
            command=lambda run: f"slime run --resume --run {run.quoted} --until model",
        ),
        Stage(
            name="frozen",
            inputs=frozen_checkpoints,
            outputs=lambda run, r: [run.frozen_dir(role) for role in frozen_checkpoints(r)],
            wanted=lambda r: bool(frozen_checkpoints(r)),
            command=lambda run: f"slime run --resume --run {run.quoted} --until frozen",
        ),
        Stage(
            name="sft",
            needs=("data", "model"),
            inputs=_sft_inputs,
            outputs=lambda run, r: [RunDir(run.sft_dir).weights_dir(r.sft.steps)],
            wanted=lambda r: r.sft.steps > 0,
            command=lambda run: f"slime train --run {run.quoted} --stage sft",
        ),
        Stage(
            name="loop",
            needs=("data", "model", "frozen", "sft"),
            inputs=_loop_inputs,
            outputs=lambda run, r: [run.checkpoint_dir(r.steps), run.weights_dir(r.steps)],
            wanted=lambda r: r.steps > 0,
            command=lambda run: f"slime run --resume --run {run.quoted}",
        ),
        Stage(
            name="export",
            needs=("loop", "sft"),
            inputs=lambda r: _dump(r, "export"),
            outputs=lambda run, r: [run.export_dir],
            command=lambda run: f"slime export --run {run.quoted}",
        ),
    )
}
"""stage name -> Stage, in the order in which `slime run` does them"""
