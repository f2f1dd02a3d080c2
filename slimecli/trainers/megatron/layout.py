"""How the ranks of a Megatron trainer are divided. Plain arithmetic: `slime plan` uses it without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimecli.model_specs import ModelSpec
from slimecli.recipe import Recipe

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "num_layers_per_virtual_pipeline_stage": "",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "sequence_parallel": "sp",
    "decoder_first_pipeline_num_layers": "first_layers",
    "decoder_last_pipeline_num_layers": "last_layers",
    "num_layers_in_first_pipeline_stage": "first_layers",
    "num_layers_in_last_pipeline_stage": "last_layers",
}
"""argument -> Layout field; empty: computed from it"""
_HOW = (
    *("recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"),
    "distribute_saved_activations",
)
"""further arguments that say how a result is computed, not which"""


def field_name(flag: str) -> str:
    """An argument as Python spells it."""
    return flag.removeprefix("--").replace("-", "_")


def without_layout(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """`[megatron]` without what changes no result beyond rounding."""
    return {k: v for k, v in megatron.items() if field_name(k) not in (*SIZES, *_HOW)}


def group_size(recipe: Recipe) -> int:
    """Neighbouring ranks that exchange activations in every layer: Megatron's tensor and context parallelism."""
    if recipe.trainer.backend != "megatron":
        return 1
    sizes = {SIZES.get(field_name(k)): v for k, v in recipe.megatron.items()}
    return int(sizes.get("tp", 1)) * int(sizes.get("cp", 1))


def data_ranks(recipe: Recipe) -> int:
    """Trainer processes that take different samples; 1 where sizes are wrong, which is told elsewhere."""
    processes = recipe.trainer.processes
    if recipe.trainer.backend != "megatron":
        return processes
    sizes = {SIZES.get(field_name(k)): v for k, v in recipe.megatron.items()}
    model = [sizes.get(name, 1) for name in ("tp", "pp", "cp")]
    if not all(isinstance(size, int) and size > 0 for size in model):
        return 1
    return 1 if processes % math.prod(model) else processes // math.prod(model)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups. Ranks are numbered tensor first, then context, expert and data, pipeline last."""

    world: int
    """trainer processes"""
    tp: int = 1
    """tensor-parallel size"""
    pp: int = 1
    """pipeline stages"""
    vpp: int = 1
    """model chunks per stage (interleaved pipelining)"""
    cp: int = 1
    """context-parallel size"""
    ep: int = 1
    """expert-parallel size"""
    etp: int = 1
    """tensor-parallel size inside experts"""
    sp: bool = False
    """sequence parallelism: activations between matrix products are split over tensor-parallel ranks"""
    first_layers: int = 0
    """layers of the first pipeline stage; 0: as many as the others"""
    last_layers: int = 0
    """layers of the last pipeline stage; 0: as many as the others"""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    def describe(self) -> str:
        """Sizes above one, as people write them: `TP2 PP2 DP4`."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep, "DP": self.dp}
        if self.ep > 1 and self.etp > 1:
            sizes["ETP"] = self.etp
        said = [f"{k}{v}" for k, v in sizes.items() if v > 1]
        return " ".join(said + (["SP"] if self.sp else [])) or "one process"


def problems(spec: ModelSpec, layout: Layout) -> list[str]:
    """Why the model cannot be divided so, each with the nearest sizes that work; empty: it can."""
    out = []
    per_model = layout.tp * layout.pp * layout.cp
    if layout.world % per_model:
        near = nearest_sizes(layout.world, lambda n: n % per_model == 0, layout.world + per_model)
        out.append(
            f"trainer.processes = {layout.world} is not a multiple of TP x PP x CP = {per_model}; {near} would be"
        )
    elif (layout.world // layout.pp) % (layout.ep * layout.etp):
        stage = layout.world // layout.pp
        near = nearest_sizes(layout.ep, lambda n: stage % (n * layout.etp) == 0 and _shares_experts(spec, n), stage)
        out.append(
            f"expert-model-parallel-size {layout.ep} x expert-tensor-parallel-size {layout.etp} does not divide the "
            f"{stage} processes of a pipeline stage; {near} x {layout.etp} does"
        )
    out += _tensor(spec, layout)
    out += _pipeline(spec, layout)
    out += _experts(spec, layout)
    if layout.sp and layout.tp == 1:
        out.append("sequence-parallel needs a tensor-model-parallel-size above 1")
    if spec.moe is not None and layout.tp > 1 and not layout.sp:
        out.append("tensor parallelism of a model with experts needs sequence-parallel = true")
    return out


def fits(other: ModelSpec, spec: ModelSpec) -> bool:
    """Whether a model's weights can stand in another's place: nothing but its name, its longest context and prediction
    layers differ."""
    return replace(other, name=spec.name, max_positions=spec.max_positions, mtp=spec.mtp) == spec


def nearest_sizes(value: int, fits: object, limit: int) -> str:
    """The nearest numbers below and above `value` that fit, as `4 or 8`."""
    assert callable(fits)
    below = next((n for n in range(value - 1, 0, -1) if fits(n)), None)
    above = next((n for n in range(value + 1, limit + 1) if fits(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None) or "no other number"


def _tensor(spec: ModelSpec, layout: Layout) -> list[str]:
    tp = layout.tp
    parts = {"query heads": spec.heads}
    if spec.mla is None:
        parts["key-value heads"] = spec.kv_heads
    dense = spec.moe is None or spec.moe.dense_layers
    if dense:
        parts["MLP rows"] = spec.ffn
    if spec.moe is not None and spec.moe.shared_ffn:
        parts["shared-expert rows"] = spec.moe.shared_ffn

    def divides(size: int, what: str) -> bool:
        count = parts[what]
        # megatron-core shares key-value heads between ranks when there are fewer than ranks, but not their output gates
        shared = what == "key-value heads" and size > count and size % count == 0 and not spec.gated
        return count % size == 0 or shared

    near = nearest_sizes(tp, lambda n: all(divides(n, what) for what in parts), max(parts.values()))
    return [
        f"tensor-model-parallel-size {tp} does not divide the {count} {what}; {near} does"
        for what, count in parts.items()
        if not divides(tp, what)
    ]


def _pipeline(spec: ModelSpec, layout: Layout) -> list[str]:
    ends = {"decoder-first": layout.first_layers, "decoder-last": layout.last_layers}
    if layout.pp == 1:
        asked = ["interleaved pipelining"] * (layout.vpp > 1)
        asked += [f"{end}-pipeline-num-layers" for end, given in ends.items() if given]
        return [f"{what} needs a pipeline-model-parallel-size above 1" for what in asked]
    layers, stages = spec.layers, layout.pp
    for end, given in ends.items():
        if given:
            layers, stages = layers - given, stages - 1
        if given % layout.vpp:
            near = nearest_sizes(given, lambda n: n % layout.vpp == 0, given + layout.vpp)
            return [
                f"{end}-pipeline-num-layers {given} is no multiple of the {layout.vpp} chunks of a stage; {near} is"
            ]
    parts = stages * layout.vpp
    if layers < parts or (parts and layers % parts) or (not parts and layers):
        uneven = layout.first_layers or layout.last_layers
        said = f"{layers} layers" + (" besides the first and last stage" if uneven else "")
        first = spec.layers - (stages - 1) * -(-spec.layers // stages) if stages > 1 else 0
        hint = (
            f"; decoder-last-pipeline-num-layers {first} leaves equal stages"
            if not uneven and layout.vpp == 1 and first > 0
            else f"; {nearest_sizes(parts, lambda n: layers % n == 0, layers)} would do"
        )
        return [f"{said} cannot be divided over {parts} pipeline parts{hint}"]
    return []


def _experts(spec: ModelSpec, layout: Layout) -> list[str]:
    if spec.moe is None:
        return [f"expert-model-parallel-size {layout.ep}: {spec.name} has no experts"] if layout.ep > 1 else []
    out = []
    if not _shares_experts(spec, layout.ep):
        near = nearest_sizes(layout.ep, lambda n: _shares_experts(spec, n), spec.moe.experts)
        out.append(f"expert-model-parallel-size {layout.ep} does not divide {spec.moe.experts} experts; {near} does")
    rows = spec.moe.ffn
    if rows % layout.etp:
        near = nearest_sizes(layout.etp, lambda n: rows % n == 0, rows)
        out.append(f"expert-tensor-parallel-size {layout.etp} does not divide {rows} rows of an expert; {near} does")
    return out


def _shares_experts(spec: ModelSpec, ranks: int) -> bool:
    return spec.moe is None or spec.moe.experts % ranks == 0
