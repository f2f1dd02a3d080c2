"""Which process runs on which machine of a Ray cluster, and with which GPUs. Arithmetic only.

GPUs are asked for in bundles, each on one machine: trainer ranks that exchange activations in every layer stay
together, and so do the GPUs of an engine. Colocated, engines and trainer ranks use the same bundles in turn.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimecli.errors import UsageError
from slimecli.recipe import Recipe
from slimecli.topology import servers_of


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    """Ray's"""
    ip: str
    slots: int
    """trainer processes it has room for"""


@dataclass(frozen=True)
class Bundle:
    """GPUs of one machine that are held for a run."""

    node: str
    """Ray's id of the machine"""
    ip: str
    gpus: tuple[int, ...]
    """their numbers on that machine"""


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    node: str
    """Ray's id of the machine; empty: wherever Ray likes, there being one machine"""
    local_rank: int
    """number of the process among those of its kind on its machine"""
    gpus: tuple[int, ...] = ()
    """GPUs of that machine which it may use; empty: there are none, and it takes processors"""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """GPUs that a run asks for."""

    ranks: int
    """trainer processes, one GPU each"""
    group: int
    """neighbouring ranks that stay on one machine (tensor x context parallelism)"""
    engines: tuple[int, ...]
    """GPUs of each engine, on one machine; one that is spread over several counts as several"""
    colocate: bool
    """engines use the trainer's GPUs, in turn with it"""

    def problem(self) -> str:
        """Why no bundles can hold this; empty: some can."""
        group = min(self.group, self.ranks)
        if self.ranks % group:
            return f"{self.ranks} trainer processes are not whole groups of {group}"
        sizes = sorted({group, *self.engines}) if self.colocate else []
        if any(large % small for small, large in itertools.pairwise(sizes)):
            said = ", ".join(str(n) for n in sizes)
            return f"colocated groups of trainer processes and engines of {said} GPUs do not share out evenly"
        return ""

    def bundles(self) -> list[int]:
        """GPUs of every bundle; the trainer's come first, unless both use the same ones."""
        group = min(self.group, self.ranks)
        if not self.colocate:
            return [group] * (self.ranks // group) + list(self.engines)
        size = max((group, *self.engines))
        return [size] * -(-max(self.ranks, sum(self.engines)) // size)


def assign(demand: Demand, bundles: Sequence[Bundle]) -> tuple[list[Place], list[Place]]:
    """(a place for every trainer rank, in rank order; a place for every engine).

    Ranks follow the machines in the order of their addresses.

    Args:
        bundles: as `demand.bundles()` asked for, in that order.
    """
    count = len(bundles) if demand.colocate else demand.ranks // min(demand.group, demand.ranks)
    trainer = sorted(bundles[:count], key=lambda b: (_order(b.ip, b.node), b.gpus))
    serving = trainer if demand.colocate else list(bundles[count:])
    ranks = [(b.node, (gpu,)) for b in trainer for gpu in b.gpus][: demand.ranks]
    return _numbered(ranks), _numbered(_serve(demand.engines, serving))


def _serve(sizes: Sequence[int], bundles: Sequence[Bundle]) -> list[tuple[str, tuple[int, ...]]]:
    """(machine, GPUs) of every engine. The largest come first, so that none straddles two bundles."""
    free = [(b.node, list(b.gpus)) for b in bundles]
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        node, gpus = next((n, g) for n, g in free if len(g) >= sizes[index])
        found[index] = node, tuple(gpus[: sizes[index]])
        del gpus[: sizes[index]]
    return [found[i] for i in range(len(sizes))]


def _numbered(processes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Place]:
    seen: dict[str, int] = {}
    places = []
    for node, gpus in processes:
        seen[node] = seen.get(node, -1) + 1
        places.append(Place(node, seen[node], gpus))
    return places


def demand_of(recipe: Recipe, group: int, gpus: int) -> Demand:
    """What a run asks of a cluster that has so many GPUs; where both do not fit, trainer and engines share them.

    Generation that goes on beside training cannot share: it then asks for more than there is, which is told.

    Args:
        group: neighbouring ranks that stay on one machine.
    """
    demand = Demand(
        ranks=recipe.trainer.processes,
        group=group,
        engines=tuple(part for server in servers_of(recipe) for part in server.parts),
        colocate=recipe.cluster.placement == "colocated",
    )
    may_share = recipe.cluster.placement == "auto" and not recipe.rollout.overlaps
    if may_share and 0 < gpus < sum(demand.bundles()):
        return replace(demand, colocate=True)
    return demand


def settled(recipe: Recipe, demand: Demand) -> Recipe:
    """The recipe with what `auto` has decided, as servers must know it that give up their memory in turn."""
    if not demand.colocate:
        return recipe
    cluster = recipe.cluster.model_copy(update={"placement": "colocated"})
    return recipe.model_copy(update={"cluster": cluster})


def place_ranks(processes: int, group: int, nodes: Sequence[Node]) -> list[Place]:
    """A place for every trainer rank of a cluster without GPUs, in rank order.

    Ranks follow the machines in the order of their addresses, and those of a group are never on two machines.

    Args:
        group: neighbouring ranks that stay together.
        nodes: the cluster's machines; with one of them, room is not asked for: the recipe says how many processes run.
    """
    if len(nodes) < 2:
        return [Place("", rank) for rank in range(processes)]
    group = min(group, processes)
    rooms = [(node, node.slots // group * group) for node in sorted(nodes, key=lambda n: _order(n.ip, n.id))]
    places = [Place(node.id, i) for node, room in rooms for i in range(room)]
    if len(places) < processes:
        said = ", ".join(f"{node.ip} {node.slots}" for node, _ in rooms)
        raise UsageError(
            f"trainer.processes = {processes} in groups of {group} that stay on one machine: the cluster has room for "
            f"{len(places)} ({said})",
            "--set trainer.processes to a number that fits, or a smaller tensor-model-parallel-size",
        )
    return places[:processes]


def _order(ip: str, node: str) -> tuple[int, str]:
    try:
        return int(ipaddress.ip_address(ip)), node
    except ValueError:  # a name instead of an address
        return 0, f"{ip} {node}"
