"""Dense decoder with grouped-query attention and SwiGLU: Qwen2.5, Qwen3, Llama 3.

Megatron keys carry the layer number (`decoder.layers.3....`): with `non_homogeneous_layers` in the checkpoint's content
metadata every Megatron loads that form, whatever layer pattern it was built with.
"""

from __future__ import annotations

from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.rule import Rule, fused_qkv, padded_rows, stacked_rows, whole

_STATEFUL = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_STATEFUL_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")


def objects(spec: ModelSpec) -> list[str]:
    """Linear layers demand theirs; attention and norms have one with Transformer Engine; extra ones are ignored."""
    names = _STATEFUL + (_STATEFUL_NORMS if spec.qk_norm else ())
    modules = [f"decoder.layers.{i}.{m}" for i in range(spec.layers) for m in names] + ["decoder.final_layernorm"]
    return [f"{m}._extra_state/shard_0_1" for m in modules]


def rules(spec: ModelSpec, padded_vocab: int = 0) -> list[Rule]:
    """All rules in layer order.

    Args:
        padded_vocab: rows of Megatron's embedding; 0: no padding.
    """
    rows = padded_vocab or spec.vocab
    table = (spec.vocab, spec.hidden)
    out = [padded_rows("model.embed_tokens.weight", "embedding.word_embeddings.weight", table, rows)]
    for layer in range(spec.layers):
        out += _layer(spec, f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    out.append(whole("model.norm.weight", "decoder.final_layernorm.weight", (spec.hidden,)))
    if not spec.tied:
        out.append(padded_rows("lm_head.weight", "output_layer.weight", table, rows))
    return out


def _layer(spec: ModelSpec, hf: str, mcore: str) -> list[Rule]:
    hidden, heads = spec.hidden, spec.heads * spec.head_dim
    attn, mlp = f"{hf}self_attn.", f"{hf}mlp."
    core, fc1 = f"{mcore}self_attention.", f"{mcore}mlp.linear_fc1."
    norm = (hidden,)
    out = [whole(f"{hf}input_layernorm.weight", f"{core}linear_qkv.layer_norm_weight", norm)]
    kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (hidden,))]
    if spec.qkv_bias:
        kinds.append(("bias", ()))
    for kind, tail in kinds:
        names = (f"{attn}q_proj.{kind}", f"{attn}k_proj.{kind}", f"{attn}v_proj.{kind}")
        key = f"{core}linear_qkv.{kind}"
        out.append(fused_qkv(names, key, kv_heads=spec.kv_heads, group=spec.group, head_dim=spec.head_dim, tail=tail))
    if spec.qk_norm:
        out += [whole(f"{attn}{x}_norm.weight", f"{core}{x}_layernorm.weight", (spec.head_dim,)) for x in ("q", "k")]
    out.append(whole(f"{attn}o_proj.weight", f"{core}linear_proj.weight", (hidden, heads)))
    out.append(whole(f"{hf}post_attention_layernorm.weight", f"{fc1}layer_norm_weight", norm))
    gate_up = [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"]
    out += stacked_rows(gate_up, f"{fc1}weight", (spec.ffn, hidden))
    out.append(whole(f"{mlp}down_proj.weight", f"{mcore}mlp.linear_fc2.weight", (hidden, spec.ffn)))
    return out
