"""GPUs of a Ray cluster, held for one run: asked for, waited for with a reason, and found out by number."""

from __future__ import annotations

import time
from typing import Any

from slimecli import console
from slimecli.cluster.ray_head import head_error
from slimecli.cluster.ray_wait import wait
from slimecli.errors import SlimeError, UsageError
from slimecli.placement import Bundle, Demand, Place, assign

_TELL_AFTER_S = 20.0
"""silence after which the wait is explained to the person watching, and between two such lines"""


class _Probe:
    """Says which GPUs Ray gave it."""

    def look(self) -> tuple[str, str, list[int]]:
        """(node id, address, GPU numbers)."""
        import ray

        gpus = [int(gpu) for gpu in ray.get_gpu_ids()]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), sorted(gpus)


class Reservation:
    """A Ray placement group, and who of the run uses what of it.

    Actors of the run ask Ray for no GPU of their own: the group holds them against others, and each process is told
    its numbers, so that engines and trainer can share them.
    """

    def __init__(self, demand: Demand, deadline_s: float) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        problem = demand.problem()
        if problem:
            raise UsageError(problem, "see `slime plan`")
        sizes = demand.bundles()
        self._group = ray.util.placement_group([{"GPU": float(n)} for n in sizes], strategy="PACK")
        try:
            self._wait(sizes, deadline_s)
            probes = [
                ray.remote(num_cpus=0, num_gpus=n)(_Probe)
                .options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i))
                .remote()
                for i, n in enumerate(sizes)
            ]
            found = wait([p.look.remote() for p in probes], "the reserved GPUs to tell their numbers", deadline_s)
            for probe in probes:
                ray.kill(probe)
        except BaseException:
            self.release()
            raise
        bundles = [Bundle(node, ip, tuple(gpus)) for node, ip, gpus in found]
        self.ranks, self.engines = assign(demand, bundles)

    def _wait(self, sizes: list[int], deadline_s: float) -> None:
        start = told = time.monotonic()
        while not self._group.wait(timeout_seconds=min(1.0, deadline_s)):
            if lost := head_error():
                raise lost
            now = time.monotonic()
            if now - start >= deadline_s:
                raise SlimeError(
                    f"gave up after {deadline_s:g} s waiting for GPUs: {_missing(sizes)}",
                    "see `ray status`; free some, add machines, or ask for fewer (trainer.processes, engine.replicas)",
                )
            if now - told >= _TELL_AFTER_S:
                told = now
                console.note(f"waiting {now - start:.0f} s for GPUs: {_missing(sizes)}")

    def release(self) -> None:
        """Give the GPUs back. Idempotent."""
        import ray

        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            ray.util.remove_placement_group(group)


def places_of(reservation: Reservation | None, engines: int) -> list[Place]:
    """Where engines run: on their GPUs, or without any wherever Ray likes."""
    return reservation.engines if reservation is not None else [Place("", i) for i in range(engines)]


def _missing(sizes: list[int]) -> str:
    """What is asked for against what the machines have, and have free."""
    import ray

    asked = " + ".join(str(n) for n in sizes)
    free = ray._private.state.available_resources_per_node()
    machines: list[str] = []
    for node in ray.nodes():
        if node["Alive"]:
            has: Any = node["Resources"].get("GPU", 0)
            left = free.get(node["NodeID"], {}).get("GPU", 0)
            machines.append(f"{node['NodeManagerAddress']}: {left:g} of {has:g} free")
    return f"{sum(sizes)} asked for (on one machine each: {asked}); {', '.join(machines)}"
