"""Trainer ranks and engines as Ray actors."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimecli import env
from slimecli.cluster.actors import TrainerHost
from slimecli.cluster.ray_engines import RayEngines
from slimecli.cluster.ray_head import watch_head
from slimecli.cluster.ray_trainer import TrainerGroup
from slimecli.cluster.reservation import Reservation, places_of
from slimecli.errors import SlimeError
from slimecli.frozen import loadable
from slimecli.placement import Node, demand_of, place_ranks, settled
from slimecli.protocols import RolloutEngine, SyncKind, Trainer
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights
from slimecli.topology import servers_of
from slimecli.trainers.megatron.layout import group_size

_KNOCK_S = 5.0
"""how long a cluster may take to accept a connection (seconds)"""


class RayCluster:
    """Starts a local Ray, or joins one, and owns the actors it creates there."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        self._recipe = recipe
        self._run = run
        self._actors: list[Any] = []
        self._engines: list[RayEngines] = []
        self._trainers: TrainerGroup | None = None
        self._reservation: Reservation | None = None
        self._started_ray = _start_ray(recipe)
        self._head = watch_head()
        self._demand = demand_of(recipe, group_size(recipe), _gpu_count())
        self.colocated = self._demand.colocate
        """trainer and engines share GPUs, and take turns"""

    def open_trainer(self, recipe: Recipe, model_dir: Path, total_steps: int) -> Trainer:
        """Open a trainer in the trainer processes, which are started once and reused."""
        if self._trainers is None:
            reserved = self._reserved()
            group, threads = self._demand.group, recipe.trainer.threads
            places = reserved.ranks if reserved else place_ranks(recipe.trainer.processes, group, _nodes(threads))
            hosts = [
                self._actor(TrainerHost, str(self._run.log_path(f"trainer_{i}")), threads, place.gpus, at=place.node)
                for i, place in enumerate(places)
            ]
            limit, one_host = recipe.cluster.start_timeout_s, recipe.is_one_host
            self._trainers = TrainerGroup(hosts, limit, places, one_host=one_host)
        self._trainers.open(recipe, model_dir, total_steps)
        return self._trainers

    def open_engine(self, recipe: Recipe, model_dir: Path) -> RolloutEngine:
        """Start the engines, wait until all answer, and put one client in front, which replaces those that die."""
        from slimecli.engines import open_engine

        if recipe.engine.urls:
            return open_engine(recipe, model_dir, logs=self._run.log_path("engines").parent)
        return self._open_servers(recipe, model_dir, "")

    def open_models(self, recipe: Recipe) -> dict[str, RolloutEngine]:
        """Start the frozen models' servers; name -> all servers of that model as one."""
        recipe = loadable(recipe, self._run) if recipe.engine.models else recipe
        return {m.name: self._open_servers(recipe, Path(m.path), m.name) for m in recipe.engine.models}

    def _open_servers(self, recipe: Recipe, model_dir: Path, model: str) -> RolloutEngine:
        recipe = settled(recipe, self._demand)
        plans = servers_of(recipe)
        places = iter(places_of(self._reserved(), sum(len(plan.parts) for plan in plans)))
        served = [(plan, list(itertools.islice(places, len(plan.parts)))) for plan in plans]
        own = [(plan, parts) for plan, parts in served if plan.model == model]
        engines = RayEngines(recipe, self._run, model_dir, self._actor, own)
        self._engines.append(engines)
        pool = engines.open()
        self._head.tell(pool.stop)
        return pool

    def stage(self, trainer: Trainer, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """Stage on the trainer's side; rank 0 writes."""
        assert isinstance(trainer, TrainerGroup)
        return trainer.stage(kind, version, folder, like)

    def _reserved(self) -> Reservation | None:
        """The run's GPUs, asked for once; None in a cluster without any."""
        if self._reservation is None and _gpu_count():
            self._reservation = Reservation(self._demand, self._recipe.cluster.start_timeout_s)
        return self._reservation

    def _actor(self, cls: type, *args: Any, at: str = "") -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # num_cpus=0: the recipe says how many processes and threads run; Ray's own book-keeping of whole CPUs would
        # refuse a trainer beside two engines on a two-core laptop.
        options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(at, soft=False)} if at else {}
        # workers of a joined cluster begin where `ray start` was called
        actor = ray.remote(num_cpus=0, max_restarts=0, **options)(cls).remote(*args, folder=str(Path.cwd()))
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """Stop our actors, and Ray if we started it."""
        import ray

        self._head.close()
        for engines in self._engines:
            engines.close()
        self._engines.clear()
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._trainers = None
        if self._reservation is not None:
            if self._head.error is None:  # nobody is left whom they could be given back to
                self._reservation.release()
            self._reservation = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


def _gpu_count() -> int:
    """GPUs of the whole cluster."""
    import ray

    return int(sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))


def _nodes(threads: int) -> list[Node]:
    """The living machines of a cluster without GPUs, with room for a trainer rank per `threads` processors."""
    import ray

    return [
        Node(n["NodeID"], n["NodeManagerAddress"], int(n["Resources"].get("CPU", 0)) // threads)
        for n in ray.nodes()
        if n["Alive"]
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
            _knock(address)
            ray.init(address=address, **common)
        else:
            ray.init(address="local", include_dashboard=False, **common)  # without, Ray joins any that it finds
    except (OSError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster could be joined at {address!r}" if address else "Ray did not start on this machine"
        there = "see `ray status` there; --ray-address auto finds this machine's own cluster, and none starts one"
        fix = there if address else "--set cluster.backend=local"
        raise SlimeError(f"{where}: {error}", fix) from error
    return True


def _knock(address: str) -> None:
    """Raise OSError or ValueError where nothing listens at an address: Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    place = urlsplit(address if "://" in address else f"//{address}")
    if not place.hostname or not place.port:
        raise ValueError("an address is HOST:PORT, or auto")
    socket.create_connection((place.hostname, place.port), timeout=_KNOCK_S).close()
