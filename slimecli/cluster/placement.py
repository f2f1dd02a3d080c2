"""Which trainer rank runs on which machine of a Ray cluster. Arithmetic only."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from slimecli.errors import UsageError


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    """Ray's"""
    ip: str
    slots: int
    """trainer processes it has room for"""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    node: str
    """Ray's id of the machine; empty: wherever Ray likes, there being one machine"""
    local_rank: int
    """number of the rank among those of its machine"""


def place_ranks(processes: int, group: int, nodes: Sequence[Node]) -> list[Place]:
    """A place for every rank, in rank order.

    Ranks follow the machines in the order of their addresses, and those of a group, which exchange activations in every
    layer, are never on two machines.

    Args:
        group: neighbouring ranks that stay together (tensor x context parallelism).
        nodes: the cluster's machines; with one of them, room is not asked for: the recipe says how many processes run.
    """
    if len(nodes) < 2:
        return [Place("", rank) for rank in range(processes)]
    group = min(group, processes)
    rooms = [(node, node.slots // group * group) for node in sorted(nodes, key=_order)]
    places = [Place(node.id, i) for node, room in rooms for i in range(room)]
    if len(places) < processes:
        said = ", ".join(f"{node.ip} {node.slots}" for node, _ in rooms)
        raise UsageError(
            f"trainer.processes = {processes} in groups of {group} that stay on one machine: the cluster has room for "
            f"{len(places)} ({said})",
            "--set trainer.processes to a number that fits, or a smaller tensor-model-parallel-size",
        )
    return places[:processes]


def _order(node: Node) -> tuple[int, str]:
    try:
        return int(ipaddress.ip_address(node.ip)), node.id
    except ValueError:  # a name instead of an address
        return 0, f"{node.ip} {node.id}"
