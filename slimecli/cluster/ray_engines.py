"""Engines as Ray actors: started, started anew when they die, with a router in front for those who need an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.cluster.actors import EngineHost
from slimecli.cluster.ray_wait import wait
from slimecli.engines import api_key, connect
from slimecli.engines.http import HttpEngine
from slimecli.engines.router import router_program, start_router
from slimecli.engines.seats import Policy
from slimecli.engines.supervisor import SupervisedPool
from slimecli.placement import Place
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir

MakeActor = Callable[..., Any]
"""(class, *arguments, at=node) -> actor"""


class RayEngines:
    """The actors behind a pool.

    Args:
        make: makes an actor of the cluster.
        places: where each engine runs.
    """

    def __init__(self, recipe: Recipe, run: RunDir, model_dir: Path, make: MakeActor, places: list[Place]) -> None:
        self._recipe = recipe
        self._run = run
        self._model_dir = model_dir
        self._make = make
        self._places = places
        self._hosts: list[Any] = [self._start(number) for number in range(len(places))]

    def open(self) -> SupervisedPool:
        """Wait until all answer; one pool over them."""
        section = self._recipe.engine
        urls = wait([h.url.remote() for h in self._hosts], "the engines to load the model", section.start_timeout_s)
        clients = [connect(self._recipe, url) for url in urls]
        pool = SupervisedPool(clients, Policy.of(self._recipe), self._respawn, log=self._run.log_path("engines"))
        if needs_router(self._recipe):
            log = self._run.log_path("router")
            key = api_key(self._recipe)
            host = section.host
            pool.router = start_router(self._recipe, urls, host=host, port=0, log=log, api_key=key, on_death=pool.stop)
        return pool

    def _start(self, number: int) -> Any:
        # the weights that the run began with may be pruned by now; which ones an engine starts with does not matter
        folder = self._model_dir if files.is_committed(self._model_dir) else self._run.model_dir
        log, place = str(self._run.log_path(f"engine_{number}")), self._places[number]
        tree = self._recipe.model_dump(mode="json")
        return self._make(EngineHost, tree, str(folder), log, place.gpus, at=place.node)

    def _respawn(self, number: int) -> HttpEngine:
        import ray

        ray.kill(self._hosts[number])
        self._hosts[number] = self._start(number)
        what = f"engine {number} to load the model"
        (url,) = wait([self._hosts[number].url.remote()], what, self._recipe.engine.start_timeout_s)
        return connect(self._recipe, url)


def needs_router(recipe: Recipe) -> bool:
    """Whether a run starts a router: for hooks that speak HTTP themselves, or where the recipe names one."""
    section = recipe.engine
    if section.router == "auto":
        return section.replicas > 1 and bool(recipe.rollout.custom_generate)
    return router_program(recipe) != "none"
