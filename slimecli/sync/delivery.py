"""The whole way of new weights: staged by the trainer, taken by every engine, kept for those that come later."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli.engines.supervisor import SupervisedPool
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine, Running, SyncKind, Trainer
from slimecli.sync.push import deliver
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt

Stage = Callable[[Trainer, SyncKind, int, Path, Path], StagedWeights]
"""(trainer, kind, version, folder, like) -> staged weights"""
TAKEN_ALONE = ("shared_memory", "tensor", "disk", "disk_delta")
"""kinds whose staged weights an engine can take by itself, until the next version is staged"""


@dataclass(frozen=True)
class Delivered:
    """What came of publishing a version."""

    staged: StagedWeights
    receipts: list[WeightReceipt]
    """of the engines that took part"""
    seconds: float
    """without the staging"""


class Delivery:
    """Publishes versions.

    Args:
        stage: the cluster's.
        kind: how weights go.
        folder: of weights on their way.
        like: HF folder with config and tokenizer.
        timeout_s: deadline of one update (seconds).
    """

    def __init__(self, stage: Stage, kind: SyncKind, folder: Path, like: Path, timeout_s: float) -> None:
        self._stage = stage
        self._kind = kind
        self._folder = folder
        self._like = like
        self._timeout_s = timeout_s

    def publish(
        self,
        trainer: Trainer,
        engine: RolloutEngine,
        version: int,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        *,
        running: Running = "finish",
    ) -> Delivered:
        """Every engine holds the trainer's weights when this returns, or is being started anew and will.

        Args:
            run: runs a coroutine on the loop that drives the engine.
            running: what becomes of requests that run.
        """

        def stage() -> StagedWeights:
            return self._stage(trainer, self._kind, version, self._folder, self._like)

        def again(staged: StagedWeights) -> StagedWeights:
            if staged.update.kind in TAKEN_ALONE:
                return staged
            found = self._stage(trainer, "disk", version, second_folder(self._folder), self._like)
            if found.fingerprint != staged.fingerprint:
                raise SlimeError(f"the trainer has gone on since version {version}", "the next version is for all")
            return found

        if isinstance(engine, SupervisedPool):
            staged, receipts, seconds = engine.publish(stage, again, run, running=running)
            return Delivered(staged, receipts, seconds)
        staged, begin = stage(), time.perf_counter()
        receipts = run(deliver(engine, staged, self._timeout_s, running=running))
        seconds = time.perf_counter() - begin
        if self._kind == "disk":
            clean_up(self._folder, self._kind)
        return Delivered(staged, receipts, seconds)


def second_folder(folder: Path) -> Path:
    """For an engine that was started anew, where the weights on the way cannot be taken twice."""
    return folder.with_name(f"{folder.name}_again")


def clean_up(folder: Path, kind: SyncKind) -> None:
    """Remove weights that were on their way: a supervised pool may need the last ones until its end."""
    for path in (folder, second_folder(folder)) if kind in ("disk", "disk_delta") else (second_folder(folder),):
        shutil.rmtree(path, ignore_errors=True)
