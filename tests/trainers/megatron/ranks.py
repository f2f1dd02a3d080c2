"""What a trainer makes of made-up batches, observed in forked ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from slimecli.trainers import open_trainer
from tests.trainers import made
from tests.trainers.processes import run_ranks

Observed = dict[str, Any]

LIKE_SGD = ("trainer.lr=3e3", "trainer.adam_eps=1e3", "trainer.beta1=0", "trainer.clip_grad=1.0")
"""Adam with an epsilon far above every gradient steps by the gradient itself: weights after a step compare gradients"""


def megatron(*layout: str, processes: int = 1) -> tuple[str, ...]:
    """Recipe overrides of a layout, e.g. `megatron("tensor_model_parallel_size=2", processes=2)`."""
    return ("trainer.backend=megatron", f"trainer.processes={processes}", *(f"megatron.{x}" for x in layout))


def observe(folder: Path, overrides: tuple[str, ...], **batches: Any) -> Observed:
    """Log-probs before each of two steps, the steps' statistics and the weights at the end, as plain data."""
    return run_ranks(world_of(overrides), train, folder, overrides, batches, join=False)[0]


def train(folder: Path, overrides: tuple[str, ...], batches: dict[str, Any]) -> Observed:
    """On one rank."""
    recipe = made.recipe(*overrides)
    trainer = open_trainer(recipe, folder, total_steps=10)
    seen: Observed = {"log_probs": [], "stats": []}
    for seed in range(2):
        batch = made.batch(recipe, seed=seed, **batches)
        if recipe.algo.kl_coef > 0 and recipe.algo.name != "sft":
            reference = trainer.log_probs(batch, "reference")
            batch = batch.replace(ref_log_probs=reference)
            seen["log_probs"].append(reference.numpy().copy())
        seen["log_probs"].append(trainer.log_probs(batch).numpy().copy())
        seen["stats"].append(asdict(trainer.step(batch)))
    seen["weights"] = weights_of(trainer)
    return seen


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    """HF name -> float32 copy."""
    return {name: tensor.float().cpu().numpy().copy() for name, tensor in trainer.weights()}


def world_of(overrides: tuple[str, ...]) -> int:
    """Processes that the overrides ask for."""
    return next((int(o.partition("=")[2]) for o in reversed(overrides) if o.startswith("trainer.processes=")), 1)


def differences(found: Observed, expected: Observed, initial: dict[str, np.ndarray]) -> dict[str, float]:
    """How far two trainings are apart.

    Returns log_probs (nats), stats (relative, of what is not near zero), update (largest error of a tensor's change
    relative to that change, by norms).
    """
    pairs = zip(found["log_probs"], expected["log_probs"], strict=True)
    out = {"log_probs": max(float(np.abs(a - b).max()) for a, b in pairs), "stats": 0.0, "update": 0.0}
    for a, b in zip(found["stats"], expected["stats"], strict=True):
        flat_a, flat_b = ({**s["metrics"], **{k: v for k, v in s.items() if k != "metrics"}} for s in (a, b))
        assert flat_a.keys() == flat_b.keys()
        for name, value in flat_b.items():
            out["stats"] = max(out["stats"], abs(flat_a[name] - value) / max(abs(value), 0.1))
    assert found["weights"].keys() == expected["weights"].keys()
    for name, b in expected["weights"].items():
        moved = float(np.linalg.norm(b - initial[name]))
        error = float(np.linalg.norm(found["weights"][name] - b))
        out["update"] = max(out["update"], error / moved if error else 0.0)
    return out
