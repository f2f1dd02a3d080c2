"""Attention of one layer: grouped queries, latent attention with or without an indexer, gated delta."""

from __future__ import annotations

from slimecli.model_specs import ModelSpec
from slimecli.model_specs.spec import GatedDelta, Indexer, Mla
from slimecli.weights.maps.layouts import Place
from slimecli.weights.maps.rule import Rule, Shape, fused_qkv, rotated_rows, whole


def attention(at: Place) -> list[Rule]:
    """All rules of a layer's attention, with the norm before it."""
    if at.is_linear and at.spec.linear is not None:
        return _gated_delta(at, at.spec.linear)
    return _latent(at, at.spec.mla) if at.spec.mla is not None else _grouped(at)


def _grouped(at: Place) -> list[Rule]:
    spec, attn, core = at.spec, f"{at.hf}self_attn.", f"{at.core}self_attention."
    hidden, heads = spec.hidden, spec.heads * spec.head_dim
    out = [whole(f"{at.hf}input_layernorm.weight", f"{core}linear_qkv.layer_norm_weight", (hidden,))]
    kinds: list[tuple[str, Shape]] = [("weight", (hidden,))]
    if spec.qkv_bias:
        kinds.append(("bias", ()))
    for kind, tail in kinds:
        out.append(
            fused_qkv(
                (f"{attn}q_proj.{kind}", f"{attn}k_proj.{kind}", f"{attn}v_proj.{kind}"),
                f"{core}linear_qkv.{kind}",
                kv_heads=spec.kv_heads,
                group=spec.group,
                head_dim=spec.head_dim,
                tail=tail,
                gated=spec.gated,
            )
        )
    # norms over all heads together are modules of slime's own, under HF's name; megatron-core has norms per head only
    module = "norm" if spec.qk_norm == "full" else "layernorm"
    for x, width in _qk_norms(spec):
        out.append(whole(f"{attn}{x}_norm.weight", f"{core}{x}_{module}.weight", (width,)))
    return [*out, whole(f"{attn}o_proj.weight", f"{core}linear_proj.weight", (hidden, heads))]


def _qk_norms(spec: ModelSpec) -> list[tuple[str, int]]:
    if not spec.qk_norm:
        return []
    full = spec.qk_norm == "full"
    return [("q", spec.head_dim * (spec.heads if full else 1)), ("k", spec.head_dim * (spec.kv_heads if full else 1))]


def _latent(at: Place, mla: Mla) -> list[Rule]:
    attn, core, hidden, heads = f"{at.hf}self_attn.", f"{at.core}self_attention.", at.spec.hidden, at.spec.heads
    out = [whole(f"{at.hf}input_layernorm.weight", f"{at.core}input_layernorm.weight", (hidden,))]
    queries = heads * mla.qk_dim
    if mla.q_rank:
        up = f"{core}linear_q_up_proj."
        out += [
            whole(f"{attn}q_a_proj.weight", f"{core}linear_q_down_proj.weight", (mla.q_rank, hidden)),
            whole(f"{attn}q_a_layernorm.weight", f"{up}layer_norm_weight", (mla.q_rank,)),
            whole(f"{attn}q_b_proj.weight", f"{up}weight", (queries, mla.q_rank)),
        ]
    else:
        out.append(whole(f"{attn}q_proj.weight", f"{core}linear_q_proj.weight", (queries, hidden)))
    up, down = f"{core}linear_kv_up_proj.", (mla.kv_rank + mla.rope_dim, hidden)
    out += [
        whole(f"{attn}kv_a_proj_with_mqa.weight", f"{core}linear_kv_down_proj.weight", down),
        whole(f"{attn}kv_a_layernorm.weight", f"{up}layer_norm_weight", (mla.kv_rank,)),
        whole(f"{attn}kv_b_proj.weight", f"{up}weight", (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)),
        whole(f"{attn}o_proj.weight", f"{core}linear_proj.weight", (hidden, heads * mla.v_dim)),
    ]
    indexer = at.spec.indexer
    return out + (_indexer(at, mla, indexer) if indexer is not None and _computes(at, indexer) else [])


def _computes(at: Place, indexer: Indexer) -> bool:
    """Configs tell it of decoder layers; of a prediction layer what is stored does."""
    if at.predicts and at.stored is not None:
        names = (f"{at.hf}self_attn.indexer.wk.weight", f"{at.core}self_attention.wk.weight")
        return any(name in at.stored for name in names)
    return indexer.computes(at.index)


def _indexer(at: Place, mla: Mla, indexer: Indexer) -> list[Rule]:
    """HF has the rotary rows of each head first, Megatron last."""
    hf, core = f"{at.hf}self_attn.indexer.", f"{at.core}self_attention."
    size, hidden = indexer.head_dim, at.spec.hidden
    turned: list[tuple[str, Shape]] = [
        ("wq_b.weight", (indexer.heads * size, mla.q_rank)),
        ("wk.weight", (size, hidden)),
        ("k_norm.weight", (size,)),
        ("k_norm.bias", (size,)),
    ]
    out = [rotated_rows(hf + n, core + n, shape, block=size, lead=mla.rope_dim) for n, shape in turned]
    name = "weights_proj.weight"
    return [*out, whole(hf + name, core + name, (indexer.heads, hidden), keep_dtype=True)]


def _gated_delta(at: Place, delta: GatedDelta) -> list[Rule]:
    hf, core, hidden = f"{at.hf}linear_attn.", f"{at.core}self_attention.linear_attn.", at.spec.hidden
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    mixed = 2 * keys + values
    inputs = (
        {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * delta.value_heads}
        if at.names.fused_delta
        else {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": delta.value_heads, "in_proj_a": delta.value_heads}
    )
    plain: dict[str, Shape] = {
        **{f"{name}.weight": (rows, hidden) for name, rows in inputs.items()},
        "conv1d.weight": (mixed, 1, delta.conv),
        "out_proj.weight": (hidden, values),
    }
    kept: dict[str, Shape] = {
        "A_log": (delta.value_heads,),
        "dt_bias": (delta.value_heads,),
        "norm.weight": (delta.value_dim,),
    }
    norm = "input_layernorm.weight"
    return [
        whole(at.hf + norm, f"{at.core}self_attention.{norm}", (hidden,)),
        *(whole(hf + name, core + name, shape) for name, shape in plain.items()),
        *(whole(hf + name, core + name, shape, keep_dtype=True) for name, shape in kept.items()),
    ]
