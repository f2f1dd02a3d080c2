"""What a step leaves in the run directory: samples and cursor, metrics, and the checkpoint that makes them final."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from slimecli import files
from slimecli.clock import Clock
from slimecli.cluster.turns import Phase
from slimecli.errors import SlimeError
from slimecli.loop import Collector
from slimecli.pipeline import trainer_layout, training_inputs
from slimecli.protocols import Trainer
from slimecli.recipe import Recipe
from slimecli.rollout.collect import Collection, RolloutCollector
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights

StepListener = Callable[[int, dict[str, Any], dict[str, float]], None]
"""(step, metrics, perf) after every commit, for displays and trackers"""


def load_data_state(run: RunDir, at_step: int) -> dict[str, Any]:
    """Cursor and buffer as the checkpoint of a step holds them."""
    path = run.checkpoint_dir(at_step) / "data_state.json"
    if not path.is_file():
        raise SlimeError(f"the checkpoint of step {at_step} lacks {path.name}", "resume from another checkpoint")
    state: dict[str, Any] = files.read_json(path)
    return state


def last_stored(run: RunDir, at_step: int) -> int:
    """The last step whose samples go with the checkpoint of a step: later ones where they were generated ahead."""
    return at_step + int(load_data_state(run, at_step).get("ahead", 0)) if at_step else 0


class Recorder:
    """Commits steps. Samples are written by a thread while the trainer learns from them.

    Args:
        stage: (trainer, kind, version, folder, like) -> staged weights: the cluster's.
        on_step: called after every committed step.
    """

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        clock: Clock,
        stage: Callable[..., StagedWeights],
        on_step: StepListener | None = None,
    ) -> None:
        self._run = run
        self._recipe = recipe
        self._clock = clock
        self._stage = stage
        self._on_step = on_step
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slime-record")
        self._written: list[Future[None]] = []

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()

    def stored_ahead(self, at_step: int) -> dict[int, Collection]:
        """Batches of later steps that were there when the checkpoint of a step was made, by step."""
        found = {}
        for step in range(at_step + 1, last_stored(self._run, at_step) + 1):
            metrics = files.read_json(self._run.data_state_path(step))["metrics"]
            found[step] = Collection(groups=self._run.read_samples(step), metrics=metrics)
        return found

    def record(self, collector: RolloutCollector, step: int, collection: Collection) -> None:
        """Commit samples and cursor, while the trainer learns from them; `settle` waits for it."""
        self.store(step, collection, collector.cursor())
        self._written.append(self._writer.submit(collector.prepare))

    def store(self, step: int, collection: Collection, cursor: dict[str, Any]) -> None:
        """Commit samples and the cursor after them, while the caller goes on; `settle` waits for it."""
        state = {"step": step, "metrics": collection.metrics, **cursor}
        self._written.append(self._writer.submit(self._write_samples, step, collection, state))

    def _write_samples(self, step: int, collection: Collection, state: dict[str, Any]) -> None:
        """Samples first, then the cursor: a cursor on disk means that its samples are there."""
        self._run.write_samples(step, collection.groups)
        files.write_json(self._run.data_state_path(step), state)

    def settle(self) -> None:
        """Wait until what was recorded is on disk; raises what went wrong there."""
        while self._written:
            self._written.pop(0).result()

    def commit(
        self,
        trainer: Trainer,
        collector: Collector,
        turn: Callable[[Phase], None],
        step: int,
        metrics: dict[str, Any],
        must_checkpoint: bool,
    ) -> None:
        """Metrics of the step, then (when due) the checkpoint that makes them final; then tell the listener."""
        self.settle()
        if metrics:
            self._run.append(self._run.metrics_path, {"step": step, **metrics})
        if step and (must_checkpoint or step % self._recipe.checkpoint.interval == 0):
            turn("share")
            with self._clock.phase("checkpoint"):
                self.checkpoint(trainer, step, collector.cursor())
        perf = self._clock.lap()
        if metrics:
            timing = {"step": step, "time": round(time.time(), 3), **perf}
            self._run.append(self._run.perf_path, timing, durable=False)
        if self._on_step is not None:
            self._on_step(step, metrics, perf)

    def checkpoint(self, trainer: Trainer, step: int, cursor: dict[str, Any]) -> None:
        """Weights, then everything to resume from, as two commits; the checkpoint names the weights it goes with."""
        weights = self._run.weights_dir(step)
        staged = self._stage(trainer, "disk", step, weights, self._run.model_dir)
        if not files.is_committed(weights):
            raise SlimeError(f"the trainer left no weights at {weights}", "see logs/latest in the run directory")
        manifest = {"step": step, "fingerprint": staged.fingerprint, "inputs": training_inputs(self._recipe)}
        manifest["trainer"] = trainer_layout(self._recipe)
        with files.committed_folder(self._run.checkpoint_dir(step), manifest) as folder:
            (folder / "trainer").mkdir()
            trainer.save(folder / "trainer")
            files.write_json(folder / "data_state.json", {"step": step, **cursor})
        self._run.prune_checkpoints(self._recipe.checkpoint.keep)
