"""What a rank holds of a model: layers, parameters, and the numbers that a token leaves behind. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slimecli.model_specs import ModelSpec, counts
from slimecli.trainers.megatron.layout import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank."""

    dense: int
    """of everything but routed experts; the optimizer's state of them is divided over data x context ranks"""
    expert: int
    """of routed experts; divided over the ranks that hold the same experts"""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """Rows of Megatron's embedding: a multiple of 128, whatever the layout, so that checkpoints fit every other one."""
    return spec.padded_vocab(128 if 128 % tp == 0 else 128 * tp)


def stage_layers(spec: ModelSpec, layout: Layout) -> list[list[int]]:
    """Layer numbers of each pipeline stage, all its chunks together."""
    layers, stages = spec.layers - layout.first_layers - layout.last_layers, layout.pp
    stages -= (layout.first_layers > 0) + (layout.last_layers > 0)
    per_chunk = layers // (stages * layout.vpp) if stages else 0
    sizes = [per_chunk] * layout.pp
    if layout.first_layers:
        sizes[0] = layout.first_layers // layout.vpp
    if layout.last_layers:
        sizes[-1] = layout.last_layers // layout.vpp
    out: list[list[int]] = [[] for _ in sizes]
    start = 0
    for _ in range(layout.vpp):
        for stage, size in enumerate(sizes):
            out[stage] += range(start, start + size)
            start += size
    return out


def stage_parameters(spec: ModelSpec, layout: Layout, stage: int) -> Parameters:
    """Parameters of a rank of a pipeline stage. A tied output layer on another stage than the embedding is a copy."""
    total = sum((_layer(spec, layout, i) for i in stage_layers(spec, layout)[stage]), Parameters(0, 0))
    rows = padded_vocab(spec, layout.tp) // layout.tp * spec.hidden
    last = stage == layout.pp - 1
    ends = rows * (stage == 0) + (rows + spec.hidden) * last
    if spec.tied and layout.pp == 1:
        ends -= rows
    return total + Parameters(ends, 0)


def prediction_parameters(spec: ModelSpec, layout: Layout) -> Parameters:
    """Parameters of the prediction layers on a rank of the last pipeline stage, if they are trained."""
    inside = _layer(spec, layout, spec.layers - 1)
    around = 2 * spec.hidden * spec.hidden // layout.tp + 3 * spec.hidden
    return Parameters(spec.mtp * (inside.dense + around), spec.mtp * inside.expert)


def prediction_width(spec: ModelSpec, layout: Layout, *, recomputed: Collection[str] = (), fused: bool = True) -> float:
    """`token_width` of all prediction layers: a layer each, and what it is made of: hidden state and embedding, both
    normed, and joined for their projection; in the end one more norm."""
    inside = token_width(spec, layout, spec.layers - 1, recomputed=recomputed, fused=fused)
    return spec.mtp * (inside + (8 if fused else 11) * spec.hidden / (layout.tp if layout.sp else 1))


def critic_parameters(spec: ModelSpec, layout: Layout, stage: int) -> Parameters:
    """The same of a critic, which has one number per token in place of the output layer, tied or not."""
    alike = stage_parameters(spec, layout, stage)
    if stage < layout.pp - 1:
        return alike
    rows = 0 if spec.tied and layout.pp == 1 else padded_vocab(spec, layout.tp) // layout.tp * spec.hidden
    return alike + Parameters(spec.hidden - rows, 0)


def _layer(spec: ModelSpec, layout: Layout, index: int) -> Parameters:
    tp, hidden = layout.tp, spec.hidden
    mixer = _attention(spec, tp) if _is_full(spec, index) else sum(counts.gated_delta(spec))  # those are not split
    dense = mixer + hidden * (4 if spec.sandwich else 2)
    moe = spec.moe
    if moe is None or index < moe.dense_layers:
        return Parameters(dense + 3 * hidden * spec.ffn // tp, 0)
    dense += hidden * moe.experts + 3 * hidden * moe.shared_ffn // tp + hidden * moe.shared_gate
    return Parameters(dense, moe.experts // layout.ep * 3 * hidden * moe.ffn // layout.etp)


def _is_full(spec: ModelSpec, index: int) -> bool:
    """Whether a layer is attention, and not a gated-delta layer."""
    return spec.linear is None or spec.linear.is_full(index)


def _attention(spec: ModelSpec, tp: int) -> int:
    hidden, mla = spec.hidden, spec.mla
    if mla is not None:
        wide = spec.heads // tp
        query = hidden * wide * mla.qk_dim
        if mla.q_rank:
            query = mla.q_rank * (hidden + 1 + wide * mla.qk_dim)
        keys = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * (1 + wide * (mla.nope_dim + mla.v_dim))
        return query + keys + wide * mla.v_dim * hidden
    q, both = spec.heads // tp * spec.head_dim, 2 * spec.kv_heads * spec.head_dim // tp
    whole = (spec.heads + spec.kv_heads) * spec.head_dim  # such norms are not split
    norms = {"head": 2 * spec.head_dim, "full": whole, "": 0}[spec.qk_norm]
    return hidden * ((3 if spec.gated else 2) * q + both) + (q + both) * spec.qkv_bias + norms


def _heads(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """Width of queries, and of keys, on a rank; ranks beyond the number of key heads share one."""
    return spec.heads // tp * spec.head_dim, max(spec.kv_heads // tp, 1) * spec.head_dim


def token_width(
    spec: ModelSpec, layout: Layout, index: int, *, recomputed: Collection[str] = (), fused: bool = True
) -> float:
    """Numbers that one token leaves on a rank in one layer until its backward pass.

    Korthikanti et al. (arXiv 2205.05198), section 4, without dropout and with attention that keeps its inputs and
    output only; a gated MLP keeps three widths of its inner layer, rotary embeddings a copy of queries and keys.

    Args:
        recomputed: modules of selective recomputation.
        fused: by Transformer Engine; without it norms, rotary embeddings and activations keep what they multiply, too.
    """
    tp = layout.tp
    whole = spec.hidden / (tp if layout.sp else 1)  # between matrix products
    norms = (2 if "layernorm" in recomputed else 4) + (0 if fused else 3)  # inputs of two, and what they give
    mixer = _attention_width(spec, tp, recomputed) * (1 if fused else 2)
    if not _is_full(spec, index):
        mixer = _delta_width(spec)
    width = norms * whole + mixer
    moe, inner = spec.moe, 3 if fused else 5
    if moe is None or index < moe.dense_layers:
        return width + (0 if "mlp" in recomputed else inner * spec.ffn / tp)
    if "moe" in recomputed:
        return width
    acts = inner - ("moe_act" in recomputed)
    # every token reaches its experts once; without expert parallelism they are those of all tensor-parallel ranks
    share = layout.etp / tp if layout.sp else 1.0
    routed = moe.top_k * (2 * spec.hidden + acts * moe.ffn / layout.etp) * share
    shared = 0 if "shared_experts" in recomputed else inner * moe.shared_ffn / tp
    return width + routed + shared + 2 * moe.experts / (tp if layout.sp else 1)


def _delta_width(spec: ModelSpec) -> float:
    """Of a gated-delta layer: what is projected, convolved, activated and normed, and the rule's float32 inputs."""
    part = spec.linear
    assert part is not None
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    return 8 * (2 * keys + values) + 10 * values


def _attention_width(spec: ModelSpec, tp: int, recomputed: Collection[str]) -> float:
    if spec.mla is None:
        q, kv = _heads(spec, tp)
        return (5 if spec.gated else 3) * q + 3 * kv
    heads, mla = spec.heads // tp, spec.mla
    up = 0 if "mla_up_proj" in recomputed else heads * (2 * mla.qk_dim + mla.v_dim)
    return mla.q_rank + mla.kv_rank + mla.rope_dim + up + heads * mla.v_dim
