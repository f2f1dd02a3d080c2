"""Trackers besides metrics.jsonl: TensorBoard and Weights & Biases behind one protocol."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

from slimecli.errors import UsageError
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir


class Tracker(Protocol):
    """Receives every step's numbers."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers of one step; entries that are not numbers are left out."""

    def close(self) -> None:
        """Write what is pending. Idempotent."""


class TensorBoardTracker:
    """Event files under RUN/tensorboard."""

    def __init__(self, run: RunDir) -> None:
        _require("tensorboard", "pip install tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        run.tensorboard_dir.mkdir(parents=True, exist_ok=True)
        # steps after the checkpoint are done again: what an attempt before wrote of them is not to be shown twice
        again = run.last_checkpoint()
        self._writer = SummaryWriter(str(run.tensorboard_dir), purge_step=None if again is None else again + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One scalar per number."""
        for key, value in numbers(metrics).items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """One W&B run per slime run; a resumed run continues the same one."""

    def __init__(self, run: RunDir, project: str, config: Mapping[str, Any]) -> None:
        wandb = _require("wandb", "pip install wandb, then `wandb login`")
        self._run = wandb.init(
            project=project, name=run.name, id=run.name, resume="allow", dir=str(run.root), config=dict(config)
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """All numbers of one step at once."""
        self._run.log(numbers(metrics), step=step)

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers, `step` left out."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def open_trackers(recipe: Recipe, run: RunDir) -> list[Tracker]:
    """The trackers [observe] asks for; one whose package is missing is a UsageError before anything starts."""
    trackers: list[Tracker] = []
    if recipe.observe.tensorboard:
        trackers.append(TensorBoardTracker(run))
    if recipe.observe.wandb_project:
        trackers.append(WandbTracker(run, recipe.observe.wandb_project, recipe.model_dump(mode="json")))
    return trackers


def _require(package: str, fix: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UsageError(f"the recipe asks for {package}, which is not installed", fix) from None
