"""Made-up groups, batches and recipes for trainer tests."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from slimecli.algos import algorithm
from slimecli.batch import TrainBatch, from_groups, weigh
from slimecli.recipe import Recipe, load_recipe
from slimecli.trainers import open_trainer
from slimecli.trainers.fsdp import FsdpTrainer
from slimecli.types import Group, Sample, SampleStatus

VOCAB = 300


def groups(count: int = 4, size: int = 4, seed: int = 0) -> list[Group]:
    """Groups with random prompts, answers of 1 to 12 tokens (the first ones in common), rewards and masks."""
    rng = random.Random(seed)
    made = []
    for g in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        start = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        group = []
        for i in range(size):
            answer = (start + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))])[: rng.randint(1, 12)]
            group.append(
                Sample(
                    group_index=g,
                    index=g * size + i,
                    tokens=prompt + answer,
                    response_length=len(answer),
                    reward=float(rng.randrange(3)),
                    loss_mask=[1] + [rng.randrange(4) > 0 for _ in answer[1:]],
                    rollout_log_probs=[-rng.random() for _ in answer],
                    status=SampleStatus.COMPLETED,
                )
            )
        made.append(group)
    return made


def recipe(*overrides: str) -> Recipe:
    """float32, a learning rate that moves a tiny model, and an epsilon that keeps Adam's first step from turning
    rounding in a gradient near zero into a full step."""
    fixed = ("model.dtype=float32", "trainer.lr=1e-3", "trainer.adam_eps=1e-4")
    return load_recipe("", (*fixed, *overrides))


def ready(batch: TrainBatch, made: Recipe) -> TrainBatch:
    """With advantages and loss weights."""
    batch = batch.replace(advantages=algorithm(made.algo.name).advantages(batch, made.algo))
    return weigh(batch, made.algo.aggregation, made.algo.constant_length or 16)


def batch(made: Recipe, seed: int = 0, temperature: float = 1.0, count: int = 4, size: int = 4) -> TrainBatch:
    """A batch to step on: `count` groups of `size` samples."""
    return ready(from_groups(groups(count, size, seed), temperature=temperature), made)


def trainer(model_dir: Path, *overrides: str, total_steps: int = 10) -> FsdpTrainer:
    """An open FSDP trainer."""
    made = open_trainer(recipe(*overrides), model_dir, total_steps=total_steps)
    assert isinstance(made, FsdpTrainer)
    return made


def weights(made: FsdpTrainer) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: tensor.detach().clone() for name, tensor in made.weights()}


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)
