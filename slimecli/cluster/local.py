"""Everything in this process: what single commands use, and `slime run` with cluster.backend = "local"."""

from __future__ import annotations

from pathlib import Path

from slimecli import env
from slimecli.errors import UsageError
from slimecli.protocols import RolloutEngine, SyncKind, Trainer
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights, stage_weights


class LocalCluster:
    """One trainer process and one in-process engine."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        env.set_threads(recipe.trainer.threads)
        self._run = run
        self._is_one_host = recipe.is_one_host
        self.colocated = recipe.cluster.placement == "colocated"
        """trainer and engine share a device, and take turns"""

    def open_trainer(self, recipe: Recipe, model_dir: Path, total_steps: int) -> Trainer:
        """The trainer of the recipe, in this process."""
        self._check(recipe)
        from slimecli.trainers import open_trainer

        return open_trainer(recipe, model_dir, total_steps=total_steps)

    def open_engine(self, recipe: Recipe, model_dir: Path) -> RolloutEngine:
        """The embedded engine in this process, or clients of engine.urls."""
        if recipe.engine.replicas != 1 and not recipe.engine.urls:
            raise UsageError(
                f"engine.replicas = {recipe.engine.replicas} needs several processes",
                'use cluster.backend = "ray" (slime run), or --set engine.replicas=1',
            )
        from slimecli.engines import open_engine

        return open_engine(recipe, model_dir, logs=self._run.root / "logs")

    def open_models(self, recipe: Recipe) -> dict[str, RolloutEngine]:
        """None: they take processes of their own, which `slime plan` says."""
        return {}

    @staticmethod
    def _check(recipe: Recipe) -> None:
        world, wanted = env.distributed_rank()[1], recipe.trainer.processes
        if wanted != world:
            raise UsageError(
                f"trainer.processes = {wanted}, but this command runs in {world} process(es)",
                'use cluster.backend = "ray" (slime run), or for this command alone: '
                f"torchrun --nproc-per-node {wanted} -m slimecli train ...",
            )

    def stage(self, trainer: Trainer, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """Stage in this process."""
        one_host = self._is_one_host
        return stage_weights(trainer.weights(), kind, version=version, folder=folder, like=like, one_host=one_host)

    def close(self) -> None:
        """Nothing outlives the parts."""
