"""The Trainer protocol over ranks that are Ray actors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli.cluster.ray_wait import wait
from slimecli.placement import Place
from slimecli.protocols import ModelName, SyncKind
from slimecli.recipe import Recipe
from slimecli.sync.stage import StagedWeights
from slimecli.types import StepStats

if TYPE_CHECKING:
    import torch

    from slimecli.batch import TrainBatch

_WORK_DEADLINE_S = 24 * 3600.0
"""a training call may be long; a dead actor is noticed at once, whatever the deadline"""


class TrainerGroup:
    """The Trainer protocol over all ranks; every call is collective and answered by rank 0.

    Args:
        one_host: no process of the run is on another machine.
    """

    def __init__(self, hosts: list[Any], start_timeout_s: float, places: list[Place], *, one_host: bool) -> None:
        self._hosts = hosts
        self._timeout_s = start_timeout_s
        self._open_calls = 0
        self._order = threading.Lock()
        """an engine that was started anew may ask for weights from a thread of its own: ranks that got calls in
        different orders would wait for each other"""
        self._names = [f"trainer rank {rank}" for rank in range(len(hosts))]
        host, port = wait([hosts[0].address.remote(one_host)], "trainer rank 0 to start", start_timeout_s)[0]
        joined = [
            h.join.remote(rank, len(hosts), host, port, place.local_rank)
            for rank, (h, place) in enumerate(zip(hosts, places, strict=True))
        ]
        wait(joined, "all trainer ranks to join the process group", start_timeout_s, self._names)

    def open(self, recipe: Recipe, model_dir: Path, total_steps: int) -> None:
        """Load a model into every rank."""
        tree = recipe.model_dump(mode="json")
        opened = [h.open.remote(tree, str(model_dir), total_steps) for h in self._hosts]
        wait(opened, "the trainer to load the model", self._timeout_s, self._names)

    def _all(self, method: str, *args: Any, what: str) -> Any:
        with self._order:
            self._open_calls += 1
            refs = [getattr(h, method).remote(*args) for h in self._hosts]
        result = wait(refs, what, _WORK_DEADLINE_S, self._names)[0]
        with self._order:
            self._open_calls -= 1
        return result

    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> torch.Tensor:
        """[T] log-probabilities."""
        import ray
        import torch

        result = self._all("log_probs", ray.put(batch.to_numpy()), model, what="the trainer to compute log-probs")
        return torch.from_numpy(result.copy())

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step on all ranks."""
        import ray

        stats: StepStats = self._all("step", ray.put(batch.to_numpy()), what="the trainer to make a step")
        return stats

    def stage(self, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """sync.stage.stage_weights inside the ranks."""
        staged: StagedWeights = self._all(
            "stage", kind, version, str(folder), str(like), what="the trainer to stage its weights"
        )
        return staged

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight through Ray's object store; publishing goes by `stage` instead."""
        import torch

        for name, array in self._all("named_weights", what="the trainer to hand over its weights"):
            yield name, torch.from_numpy(array.copy())

    def save(self, folder: Path) -> None:
        """Collective save."""
        self._all("save", str(folder), what="the trainer to save")

    def load(self, folder: Path) -> None:
        """Collective load."""
        self._all("load", str(folder), what="the trainer to load its checkpoint")

    def sleep(self) -> None:
        """Every rank gives up its device's memory."""
        self._all("sleep", what="the trainer to give up its memory")

    def wake(self) -> None:
        """Every rank takes it back."""
        self._all("wake", what="the trainer to take its memory back")

    def close(self) -> None:
        """Free the trainer; the processes stay for the next one.

        After a call that failed or was interrupted they may be dead, or busy for long: the cluster ends them.
        """
        if not self._open_calls:
            self._all("close", what="the trainer to close")
