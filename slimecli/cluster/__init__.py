"""Where trainer and engines run. `loop.py` sees the same protocols whichever cluster is chosen."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from slimecli import env
from slimecli.lookup import look_up
from slimecli.protocols import RolloutEngine, SyncKind, Trainer
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights


class Cluster(Protocol):
    """Opens trainers and engines, and moves weights out of a trainer."""

    colocated: bool
    """trainer and engines share devices, and take turns"""

    def open_trainer(self, recipe: Recipe, model_dir: Path, total_steps: int) -> Trainer:
        """A trainer holding the weights of an HF folder."""

    def open_engine(self, recipe: Recipe, model_dir: Path) -> RolloutEngine:
        """All engines of the recipe behind one RolloutEngine."""

    def open_models(self, recipe: Recipe) -> Mapping[str, RolloutEngine]:
        """Frozen models that are served beside the policy, by name."""

    def stage(self, trainer: Trainer, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """Run sync.stage.stage_weights where the trainer lives."""

    def close(self) -> None:
        """Stop what this cluster started, and nothing else. Idempotent."""


CLUSTERS: dict[str, str] = {
    "local": "slimecli.cluster.local:LocalCluster",
    "ray": "slimecli.cluster.ray_cluster:RayCluster",
    "torchrun": "slimecli.cluster.torchrun:TorchrunCluster",
}


def open_cluster(backend: str, recipe: Recipe, run: RunDir) -> Cluster:
    """The cluster by name (recipe.cluster.backend, or `local` for single commands, which torchrun may have started)."""
    if backend == "local" and env.distributed_rank()[1] > 1:
        backend = "torchrun"
    kind = look_up(CLUSTERS, backend, "cluster", "set cluster.backend to one of {known}")
    with own_signals():
        cluster: Cluster = kind(recipe, run)
    return cluster


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep our Ctrl-C and SIGTERM handlers: ray.init puts an exit of its own in their place, in mid-step and silent."""
    if threading.current_thread() is not threading.main_thread():  # Python lets only this one set handlers
        yield
        return
    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def sync_kind(recipe: Recipe, backend: str) -> SyncKind:
    """The recipe's kind, or for `auto` the quickest that reaches the engines."""
    return recipe.sync_kind(backend)
