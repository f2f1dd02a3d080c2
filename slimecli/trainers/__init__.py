"""Trainers: who turns a TrainBatch into new weights. All satisfy slimecli.protocols.Trainer."""

from __future__ import annotations

from pathlib import Path

from slimecli.lookup import look_up
from slimecli.protocols import Trainer
from slimecli.recipe import Recipe

TRAINERS: dict[str, str] = {
    "fsdp": "slimecli.trainers.fsdp:FsdpTrainer",
    "megatron": "slimecli.trainers.megatron.trainer:MegatronTrainer",
}


def open_trainer(recipe: Recipe, model_dir: Path, *, total_steps: int) -> Trainer:
    """The recipe's trainer, holding the weights of an HF folder. Called on every rank.

    Args:
        recipe: `trainer.backend` chooses; `algo` says what is minimised.
        model_dir: initial weights; the reference model too, where the recipe asks for one.
        total_steps: optimizer steps of the whole stage, the length of the learning-rate schedule.
    """
    kind = look_up(TRAINERS, recipe.trainer.backend, "trainer", "set trainer.backend to one of {known}")
    trainer: Trainer = kind(recipe, model_dir, total_steps=total_steps)
    return trainer
