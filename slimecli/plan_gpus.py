"""GPUs that a run asks for, against those that are there, and the memory of each by phase."""

from __future__ import annotations

from dataclasses import replace

from slimecli.model_specs import ModelSpec
from slimecli.placement import Demand, demand_of
from slimecli.plan_numbers import LIBRARIES, Value, parts_of, total_of
from slimecli.recipe import Recipe
from slimecli.topology import policy_servers
from slimecli.trainers.megatron.layout import group_size

GPU_MEMORY = "memory of a GPU"
"""heading of the phases"""


def gpu_demand(recipe: Recipe, gpus: int) -> Demand:
    """What the run asks for where there are so many GPUs."""
    return demand_of(recipe, group_size(recipe), gpus)


def gpu_problems(recipe: Recipe, gpus: int) -> list[str]:
    """More GPUs than this machine has; of a cluster that is joined, only the cluster knows."""
    if not gpus or recipe.cluster.address or recipe.cluster.backend != "ray":
        return []
    demand = gpu_demand(recipe, gpus)
    asked = sum(demand.bundles())
    if asked <= gpus:
        return []
    fix = "fewer `trainer.processes` or engines"
    if not demand.colocate and sum(replace(demand, colocate=True).bundles()) <= gpus:
        overlaps = "`rollout.max_staleness` = 0, after which they share GPUs in turn"
        fix = overlaps if recipe.rollout.overlaps else "`cluster.placement` = 'colocated'"
    return [f"the run asks for {asked} GPUs ({_said(demand)}), this machine has {gpus}: take {fix}, or a cluster"]


def gpu_values(recipe: Recipe, gpus: int, trainer: list[Value], engine: list[Value], spec: ModelSpec) -> list[Value]:
    """Bundles of GPUs, and what one of them holds in each phase; nothing where there are none.

    Args:
        trainer, engine: memory of one process, as the plan has them.
    """
    if not gpus and not recipe.cluster.address:
        return []
    demand = gpu_demand(recipe, gpus)
    size, (weights, cache) = parts_of(trainer), _on_one_gpu(recipe, parts_of(engine), spec)
    whole = total_of(trainer) - size.get("libraries", 0)
    held = weights + cache
    rows: list[tuple[str, int, str]] = [("learn", whole, "a trainer process; an engine beside it holds nothing")]
    if demand.colocate and demand.engines:
        lasting = ("weights", "critic", "optimizer", *["gradients"] * (recipe.trainer.backend == "megatron"))
        resting = sum(size.get(name, 0) for name in lasting)
        rows += [
            ("generate", held, f"an engine's share; the trainer's {whole / 1e9:.2f} GB rest in host memory"),
            (
                "publish",
                resting + weights,
                f"{', '.join(n for n in lasting if n in size)} of the trainer, weights of the engine",
            ),
        ]
    elif demand.engines:
        rows = [("trainer's", whole, "one process each"), ("engine's", held, "an engine, or its share of one")]
    asked = Value(
        group="placement", name="GPUs", value=sum(demand.bundles()), unit="", reason=f"{_said(demand)}; in bundles on "
        f"one machine each: {' + '.join(str(n) for n in demand.bundles())}",
    )  # fmt: skip
    without = f", without {LIBRARIES}"
    return [asked, *(Value(group=GPU_MEMORY, name=n, value=v, unit="bytes", reason=r + without) for n, v, r in rows)]


def _on_one_gpu(recipe: Recipe, whole: dict[str, int], spec: ModelSpec) -> tuple[int, int]:
    """(weights, cache) of the policy's engine that has the fewest GPUs, on one of them.

    Pipeline stages divide the layers, tensor-parallel ranks the matrices and the cache's heads. A rank has at least one
    head, and the whole of a cache without heads (latent attention).
    """
    if recipe.engine.urls or not recipe.steps:
        return 0, 0
    server = min(policy_servers(recipe), key=lambda s: s.gpus)
    ranks, stages = server.recipe.engine_layout
    heads = 1 if spec.mla else min(ranks, spec.kv_heads)
    return whole["weights"] // (ranks * stages), whole["KV cache, at most"] // (heads * stages)


def _said(demand: Demand) -> str:
    trainer = f"{demand.ranks} for the trainer"
    if not demand.engines:
        return trainer
    return f"{trainer}, {sum(demand.engines)} for engines" + ", shared in turn" * demand.colocate
