"""Trainer ranks and engines as Ray actors. The only module that talks to Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli import console, env
from slimecli.cluster.actors import EngineHost, TrainerHost, lost_peer
from slimecli.cluster.placement import Node, Place, place_ranks
from slimecli.errors import SlimeError
from slimecli.protocols import ModelName, RolloutEngine, SyncKind, Trainer
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights
from slimecli.types import StepStats

if TYPE_CHECKING:
    import torch

    from slimecli.batch import TrainBatch

_WORK_DEADLINE_S = 24 * 3600.0
"""a training call may be long; a dead actor is noticed at once, whatever the deadline"""
_CAUSE_S = 15.0
"""how long the process that others lost is looked for; Ray notices a death within a second or two"""
_TELL_AFTER_S = 60.0
"""silence after which a wait is explained to the person watching"""


class RayCluster:
    """Starts a local Ray, or joins one, and owns the actors it creates there."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        self._recipe = recipe
        self._run = run
        self._actors: list[Any] = []
        self._trainers: TrainerGroup | None = None
        self._started_ray = _start_ray(recipe)

    def open_trainer(self, recipe: Recipe, model_dir: Path, total_steps: int) -> Trainer:
        """Open a trainer in the trainer processes, which are started once and reused."""
        if self._trainers is None:
            places = place_ranks(recipe.trainer.processes, _closest_group(recipe), _nodes(recipe.trainer.threads))
            hosts = [
                self._actor(TrainerHost, str(self._run.log_path(f"trainer_{i}")), recipe.trainer.threads, at=place.node)
                for i, place in enumerate(places)
            ]
            self._trainers = TrainerGroup(hosts, recipe.cluster.start_timeout_s, places)
        self._trainers.open(recipe, model_dir, total_steps)
        return self._trainers

    def open_engine(self, recipe: Recipe, model_dir: Path) -> RolloutEngine:
        """Start the engines, wait until all answer, and put one client in front of them."""
        from slimecli.engines import open_engine
        from slimecli.engines.http import HttpEngine
        from slimecli.engines.pool import EnginePool

        if recipe.engine.urls:
            return open_engine(recipe, model_dir)
        tree = recipe.model_dump(mode="json")
        hosts = [
            self._actor(EngineHost, tree, str(model_dir), str(self._run.log_path(f"engine_{i}")))
            for i in range(recipe.engine.replicas)
        ]
        urls = wait([h.url.remote() for h in hosts], "the engines to load the model", recipe.engine.start_timeout_s)
        timeout_s, retries = recipe.rollout.request_timeout_s, recipe.rollout.max_retries
        return EnginePool([HttpEngine(url, timeout_s=timeout_s, retries=retries) for url in urls])

    def stage(self, trainer: Trainer, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """Stage on the trainer's side; rank 0 writes."""
        assert isinstance(trainer, TrainerGroup)
        return trainer.stage(kind, version, folder, like)

    def _actor(self, cls: type, *args: Any, at: str = "") -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # num_cpus=0: the recipe says how many processes and threads run; Ray's own book-keeping of whole CPUs would
        # refuse a trainer beside two engines on a two-core laptop.
        options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(at, soft=False)} if at else {}
        actor = ray.remote(num_cpus=0, max_restarts=0, **options)(cls).remote(*args)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """Stop our actors, and Ray if we started it."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._trainers = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


class TrainerGroup:
    """The Trainer protocol over all ranks; every call is collective and answered by rank 0."""

    def __init__(self, hosts: list[Any], start_timeout_s: float, places: list[Place]) -> None:
        self._hosts = hosts
        self._timeout_s = start_timeout_s
        self._is_idle = True
        host, port = wait([hosts[0].address.remote()], "trainer rank 0 to start", start_timeout_s)[0]
        joined = [
            h.join.remote(rank, len(hosts), host, port, place.local_rank)
            for rank, (h, place) in enumerate(zip(hosts, places, strict=True))
        ]
        wait(joined, "all trainer ranks to join the process group", start_timeout_s)

    def open(self, recipe: Recipe, model_dir: Path, total_steps: int) -> None:
        """Load a model into every rank."""
        tree = recipe.model_dump(mode="json")
        opened = [h.open.remote(tree, str(model_dir), total_steps) for h in self._hosts]
        wait(opened, "the trainer to load the model", self._timeout_s)

    def _all(self, method: str, *args: Any, what: str) -> Any:
        self._is_idle = False
        refs = [getattr(h, method).remote(*args) for h in self._hosts]
        result = wait(refs, what, _WORK_DEADLINE_S)[0]
        self._is_idle = True
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

    def close(self) -> None:
        """Free the trainer; the processes stay for the next one.

        After a call that failed or was interrupted they may be dead, or busy for long: the cluster ends them.
        """
        if self._is_idle:
            self._all("close", what="the trainer to close")


def _closest_group(recipe: Recipe) -> int:
    """Neighbouring ranks that exchange activations in every layer."""
    if recipe.trainer.backend != "megatron":
        return 1
    from slimecli.trainers.megatron.layout import group_size

    return group_size(recipe.megatron)


def _nodes(threads: int) -> list[Node]:
    """The living machines of the cluster with room for a trainer rank per GPU, or where there are none per `threads`
    processors."""
    import ray

    alive = [n for n in ray.nodes() if n["Alive"]]
    has_gpus = any(n["Resources"].get("GPU") for n in alive)
    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            int(n["Resources"].get("GPU", 0)) if has_gpus else int(n["Resources"].get("CPU", 0)) // threads,
        )
        for n in alive
    ]


def _start_ray(recipe: Recipe) -> bool:
    """True if a local Ray was started, False if one was there."""
    import logging

    import ray

    if ray.is_initialized():
        return False
    env.set_threads(recipe.trainer.threads)
    env.quiet_ray()
    # Ray says on every start that its authentication is on; that it is off is worth a line
    token_log = logging.getLogger("ray._private.authentication.authentication_token_setup")
    token_log.addFilter(lambda record: "is enabled" not in record.getMessage())
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    address = recipe.cluster.address
    try:
        if address:
            ray.init(address=address, **common)
        else:
            ray.init(include_dashboard=False, **common)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster could be joined at {address!r}" if address else "Ray did not start on this machine"
        fix = "see `ray status` there, or leave cluster.address empty" if address else "--set cluster.backend=local"
        raise SlimeError(f"{where}: {error}", fix) from error
    return True


def wait(refs: list[Any], what: str, deadline_s: float) -> list[Any]:
    """The results of Ray calls. The first failure ends the wait, with its own error; silence is explained.

    A rank that only lost its connection to another is no first failure: that other one is looked for.

    Raises SlimeError: what the actor raised, that an actor died, or that the deadline passed.
    """
    import ray

    start = told = time.monotonic()
    pending = list(refs)
    while pending:
        left = max(0.0, start + deadline_s - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=min(5.0, left))
        for ref in done:
            _check(ref, pending, what)
        now = time.monotonic()
        if pending and now - told > _TELL_AFTER_S:
            told = now
            console.note(f"waiting {now - start:.0f} s for {what}: {len(pending)} of {len(refs)} not done")
        if pending and now - start >= deadline_s:
            raise SlimeError(f"gave up after {deadline_s:g} s waiting for {what}", "see logs/latest in the run")
    return [_result(ref, what) for ref in refs]


def _check(ref: Any, others: list[Any], what: str) -> None:
    """Raise if a call failed; if that is only a consequence, then for its cause."""
    import ray

    try:
        _result(ref, what)
    except ray.exceptions.RayTaskError as error:
        if not lost_peer(error.cause):
            raise
        end = time.monotonic() + _CAUSE_S
        while others and (left := end - time.monotonic()) > 0:
            done, others = ray.wait(others, num_returns=1, timeout=left)
            for other in done:
                _check(other, [], what)
        raise SlimeError(
            f"a worker process lost the others while we waited for {what}: {error.cause}",
            "see logs/latest in the run directory; continue with `slime run --resume`",
        ) from error


def _result(ref: Any, what: str) -> Any:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SlimeError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        detail = str(error).splitlines()[0]
        raise SlimeError(
            f"a worker process died while we waited for {what}: {detail}",
            "see logs/latest in the run directory; continue with `slime run --resume`",
        ) from error
    except ray.exceptions.RayError as error:
        detail = str(error).partition("\n")[0]
        raise SlimeError(f"Ray lost the answer while we waited for {what}: {detail}", "see logs/latest") from error
