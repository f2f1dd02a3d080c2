"""What a step's metrics say of its optimizer steps."""

from __future__ import annotations

from typing import Any

from slimecli.algos.distillation import teacher_gap
from slimecli.batch import TrainBatch
from slimecli.recipe_algo import AlgoSection
from slimecli.types import StepStats


def train_metrics(stats: list[StepStats]) -> dict[str, Any]:
    """Metrics of a step's optimizer steps: means, except what only the first or the last can tell.

    The log-prob gap compares engine and trainer on the same weights, which holds for the first mini-batch alone.
    """
    first, last, n = stats[0], stats[-1], len(stats)
    merged = {f"train/{k}": sum(s.metrics[k] for s in stats) / n for k in first.metrics}
    merged |= {f"train/{k}": v for k, v in first.metrics.items() if k.startswith("logprob_gap")}
    return merged | {
        "train/loss": sum(s.loss for s in stats) / n,
        "train/grad_norm": sum(s.grad_norm for s in stats) / n,
        "train/lr": last.lr,
        "train/tokens": sum(s.tokens for s in stats),
    }


def teacher_metrics(minis: list[TrainBatch]) -> dict[str, float]:
    """How far the policy that answered is from its teacher: mean over trained tokens of log policy - log teacher."""
    gap = sum(float(teacher_gap(mini).sum()) for mini in minis)
    return {"train/teacher_kl": gap / max(1.0, sum(float(mini.loss_mask.sum()) for mini in minis))}


def first_step_check(first: StepStats, algo: AlgoSection) -> dict[str, float]:
    """Before anything is learnt, policy, old policy and reference are the same weights: both KLs must vanish.

    Where the engine speaks for the old policy, the log-prob gap says how far it is away.
    """
    names = ("kl",) if algo.old_log_probs == "engine" else ("kl", "ppo_kl")
    return {"train/first_step_kl": max(abs(first.metrics.get(k, 0.0)) for k in names)}
