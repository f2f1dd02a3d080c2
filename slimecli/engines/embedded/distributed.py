"""Weights over a process group of their own, as SGLang's update_weights_from_distributed has it.

The group is built beside torch.distributed's default group, so that an engine can belong to several.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slimecli.engines.embedded.config import DTYPES
from slimecli.engines.embedded.weights import Header, WeightsRefused

TIMEOUT = datetime.timedelta(seconds=120)
"""for joining, and for every broadcast"""


def headers(group: Mapping[str, Any]) -> list[Header]:
    """Names, shapes and dtypes that will be broadcast, in order."""
    try:
        names, dtypes, shapes = group["names"], group["dtypes"], group["shapes"]
        found = [
            (name, tuple(shape), str(dtype).removeprefix("torch."))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsRefused(f"names, dtypes and shapes do not belong together: {error}", "send equal lists") from None
    bad = [f"{name} has dtype {dtype}" for name, _, dtype in found if dtype not in DTYPES]
    if bad:
        raise WeightsRefused(bad[0], f"use {', '.join(DTYPES)}")
    return found


class Groups:
    """The process groups this engine belongs to, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def join(self, payload: Mapping[str, Any]) -> None:
        """Enter a group; blocks until every member is there. Rank 0 is the trainer."""
        name = str(payload.get("group_name", "weight_update_group"))
        if name in self._groups:
            raise WeightsRefused(f"group {name!r} exists already", "destroy it first")
        try:
            address = (str(payload["master_address"]), int(payload["master_port"]))
            rank, world = int(payload["rank_offset"]), int(payload["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            fix = "give master_address, master_port, rank_offset and world_size"
            raise WeightsRefused(f"bad group description: {error!r}", fix) from None
        self._groups[name] = open_group(address, rank, world, name, str(payload.get("backend", "gloo")))

    def receive(
        self, group: Mapping[str, Any], wanted: list[Header], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The broadcast tensors, one at a time."""
        name = str(group.get("group_name", "weight_update_group"))
        if name not in self._groups:
            raise WeightsRefused(f"no group {name!r}", "call init_weights_update_group first")
        return self._receive(self._groups[name], wanted, device)

    @staticmethod
    def _receive(group: Any, wanted: list[Header], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype in wanted:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
            torch.distributed.broadcast(tensor, src=0, group=group)
            yield name, tensor

    def leave(self, name: str) -> None:
        """Leave a group."""
        if name not in self._groups:
            raise WeightsRefused(f"no group {name!r}", "it may have been destroyed already")
        torch.distributed.destroy_process_group(self._groups.pop(name))

    def close(self) -> None:
        """Leave all."""
        for name in list(self._groups):
            self.leave(name)


def open_group(
    address: tuple[str, int], rank: int, world: int, name: str, backend: str, listen_fd: int | None = None
) -> Any:
    """A process group outside the default one, at the same store keys as SGLang's init_custom_process_group.

    Args:
        listen_fd: rank 0: a socket that listens at `address` and is the store's from here on; None: the store listens
            by itself, on all interfaces.
    """
    from torch.distributed import distributed_c10d as c10d

    # torch leaves these names out of its own __all__
    new_store = torch.distributed.TCPStore  # type: ignore[attr-defined]
    store = new_store(*address, world, rank == 0, timeout=TIMEOUT, master_listen_fd=listen_fd)
    prefixed = torch.distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
    group, _ = c10d._new_process_group_helper(
        world, rank, [], torch.distributed.Backend(backend), prefixed, group_name=c10d.GroupName(name), timeout=TIMEOUT
    )
    # torch keeps this table for groups made by new_group; without it broadcast(src=0) cannot map ranks
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
