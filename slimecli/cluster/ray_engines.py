"""Engines as Ray actors: started, started anew when they die, with a router in front for those who need an address."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.cluster.actors import EngineHost
from slimecli.cluster.ray_head import head_error
from slimecli.cluster.ray_wait import wait
from slimecli.engines import api_key, connect
from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.engines.router import router_program, start_router
from slimecli.engines.router.launch import Router
from slimecli.engines.seats import Policy
from slimecli.engines.streaming import Tell
from slimecli.engines.supervisor import POLL_S, SupervisedPool
from slimecli.errors import SlimeError
from slimecli.placement import Place
from slimecli.ports import free_port
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.topology import ServerPlan

CLOSE_S = 8.0
"""how long SGLang's servers may take to end by themselves (seconds)"""
_LOADING = "the engines to load the model"
MakeActor = Callable[..., Any]
"""(class, *arguments, at=node) -> actor"""


class RoutedPool(SupervisedPool):
    """Requests go through the router, which knows who computes prompts and who continues answers.

    Which server died a request does not show: where one fails, every server is asked, and those that are gone are
    started anew. Every answer is a request of its own: smg, before servers of two kinds, takes no lists of sampling
    parameters.
    """

    through: HttpEngine

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """By the router's address; once more, within bounds, where a server was lost."""
        if isinstance(payload.get("sampling_params"), list):
            return list(await asyncio.gather(*(self.generate(one) for one in _each(payload))))
        told: list[str] = []
        for _ in range(self.policy.retries + 1):
            try:
                return await self.through.generate(payload)
            except SlimeError as error:
                await self._look_at_all()
                lost = [f"{self._name(s.number)} is lost: {s.why}" for s in self.seats if s.state in ("down", "out")]
                if not lost:
                    raise
                told.append(f"{error.what} ({'; '.join(lost)})")
            while any(s.state == "down" for s in self.seats):
                self._raise_if_over()
                await asyncio.sleep(POLL_S)
        raise EngineUnreachableError(
            f"a request failed {len(told)} times with servers lost behind the router, last: {told[-1]}",
            "see the servers' logs; continue with `slime run --resume`",
        )

    async def generate_stream(self, payload: Mapping[str, Any], tell: Tell) -> None:
        """The same; each answer is told as a whole, when it has ended."""

        async def say(index: int, one: Mapping[str, Any]) -> None:
            tell({**await self.generate(one), "index": index})

        await asyncio.gather(*(say(i, one) for i, one in enumerate(_each(payload))))


def _each(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The requests of single answers that a request of several is made of."""
    for ids, params in zip(payload["input_ids"], payload["sampling_params"], strict=True):
        yield {**payload, "input_ids": ids, "sampling_params": params}


class RayEngines:
    """The actors behind a pool: all servers of one model.

    Args:
        make: makes an actor of the cluster.
        servers: what each is, and where its parts run.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        model_dir: Path,
        make: MakeActor,
        servers: Sequence[tuple[ServerPlan, Sequence[Place]]],
    ) -> None:
        self._recipe = recipe
        self._run = run
        self._model_dir = model_dir
        self._make = make
        self._servers = servers
        self._name = servers[0][0].model or "engine"
        self._router: Router | None = None
        self._hosts: list[list[Any]] = [self._start(number) for number in range(len(servers))]
        """per server an actor on each of its machines; the first one answers"""
        self._is_up = False

    def open(self) -> SupervisedPool:
        """Wait until all answer; one pool over them."""
        section = self._recipe.engine
        what = f"the servers of {self._name} to load the model" if self._name != "engine" else _LOADING
        parts = list(itertools.chain(*self._hosts))
        told = dict(zip(parts, wait([p.url.remote() for p in parts], what, section.start_timeout_s), strict=True))
        self._is_up = True
        urls = [told[first] for first, *_ in self._hosts]
        clients = [connect(self._recipe, url) for url in urls]
        plans = [plan for plan, _ in self._servers]
        split = any(plan.kind != "regular" for plan in plans)
        kind = RoutedPool if split else SupervisedPool
        pool = kind(clients, Policy.of(self._recipe), self._respawn, log=self._run.log_path(f"{self._name}s"))
        frozen = self._name != "engine" and section.router != "none"  # others have its address, which must stay
        if split or frozen or needs_router(self._recipe, len(plans)):
            pool.router = self._router = start_router(
                self._recipe,
                urls,
                host=section.host,
                port=0,
                log=self._run.log_path("router" if self._name == "engine" else f"router_{self._name}"),
                api_key=api_key(self._recipe),
                on_death=pool.stop,
                roles=[(plan.kind, plan.bootstrap_port) for plan in plans] if split else (),
            )
        if isinstance(pool, RoutedPool) and pool.router is not None:
            pool.through = connect(self._recipe, pool.router.url)
        return pool

    def _start(self, number: int) -> list[Any]:
        # the weights that the run began with may be pruned by now; which ones an engine starts with does not matter
        folder = self._model_dir if files.is_committed(self._model_dir) else self._run.model_dir
        plan, places = self._servers[number]
        if plan.path:
            folder = Path(plan.path).expanduser().absolute()
        tree, actors = plan.recipe.model_dump(mode="json"), []
        meeting = _meeting(places[0].node, self._recipe.cluster.start_timeout_s) if len(places) > 1 else ""
        for rank, place in enumerate(places):
            log = str(self._run.log_path(f"{self._name}_{number}" + f"_machine_{rank}" * bool(rank)))
            share = (len(places), rank, meeting) if meeting else None
            actors.append(self._make(EngineHost, tree, str(folder), log, place.gpus, number, share, at=place.node))
        return actors

    def close(self) -> None:
        """End all servers. Idempotent."""
        self._end(list(itertools.chain(*self._hosts)))
        self._hosts = []

    def _end(self, hosts: Sequence[Any]) -> None:
        """End actors; SGLang's servers first, by themselves.

        Ray kills what an actor has started together with it, and what a server has in /dev/shm would stay.
        """
        import ray

        if hosts and self._is_up and self._recipe.engine.backend == "sglang" and head_error() is None:
            ray.wait([host.close.remote() for host in hosts], num_returns=len(hosts), timeout=CLOSE_S)
        for host in hosts:
            ray.kill(host)

    def _respawn(self, number: int) -> HttpEngine:
        self._end(self._hosts[number])
        self._hosts[number] = self._start(number)
        what = f"{self._name} {number} to load the model"
        parts = [part.url.remote() for part in self._hosts[number]]
        url = wait(parts, what, self._recipe.engine.start_timeout_s)[0]
        plan, _ = self._servers[number]
        if self._router is not None and plan.kind != "regular":
            self._router.roles[url] = (plan.kind, plan.bootstrap_port)
        return connect(self._recipe, url)


def _meeting(node: str, deadline_s: float) -> str:
    """HOST:PORT at which the machines of an engine meet: a port that is free on the first one now."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    address = _address(node)
    options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} if node else {}
    port = ray.remote(num_cpus=0, **options)(free_port).remote(address)
    (found,) = wait([port], "a free port of an engine's first machine", deadline_s)
    return f"{address}:{found}"


def _address(node: str) -> str:
    """Of a machine of the cluster; this one's where all processes are on it."""
    import ray

    if not node:
        return str(ray.util.get_node_ip_address())
    return str(next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node))


def needs_router(recipe: Recipe, servers: int) -> bool:
    """Whether a model's servers get a router: for hooks that speak HTTP themselves, or where the recipe names one."""
    section = recipe.engine
    if section.router == "auto":
        return servers > 1 and bool(recipe.rollout.custom_generate)
    return router_program(recipe) != "none"
