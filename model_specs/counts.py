"""Parameters, bytes and arithmetic of a model, by counting its matrices.

Parameters are what transformers' class of the family has as nn.Parameter. The routers' correction biases (a buffer of
one number per expert) are not among them, and multi-token-prediction layers are counted apart (`mtp_params`): most
published sizes leave them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimecli.model_specs.spec import ModelSpec

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
"""bytes per element"""


def full_layers(spec: ModelSpec) -> int:
    """Layers whose attention looks at the whole context."""
    return spec.layers if spec.linear is None else spec.layers // spec.linear.full_every


def index_layers(spec: ModelSpec) -> int:
    """Layers that compute sparse-attention indices."""
    return sum(spec.indexer.computes(i) for i in range(spec.layers)) if spec.indexer else 0


def attention(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of one full-attention layer without its indexer: of matrices, of norms and biases."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    mla = spec.mla
    if mla is None:
        matrices = spec.hidden * (q * (3 if spec.gated else 2) + 2 * kv)
        norm = {"head": 2 * spec.head_dim, "full": q + kv, "": 0}[spec.qk_norm]
        return matrices, norm + (q + 2 * kv if spec.qkv_bias else 0)
    wide = spec.heads * mla.qk_dim
    query = spec.hidden * mla.q_rank + mla.q_rank * wide if mla.q_rank else spec.hidden * wide
    keys = spec.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * spec.heads * (mla.nope_dim + mla.v_dim)
    return query + keys + spec.heads * mla.v_dim * spec.hidden, mla.q_rank + mla.kv_rank


def indexer(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of the indexer of one layer that computes indices: of matrices, of its layer norm."""
    if spec.indexer is None or spec.mla is None:
        return 0, 0
    wide = spec.indexer.heads * spec.indexer.head_dim
    keys_and_weights = spec.hidden * (spec.indexer.head_dim + spec.indexer.heads)
    return spec.mla.q_rank * wide + keys_and_weights, 2 * spec.indexer.head_dim


def gated_delta(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of one gated-delta layer: of matrices, of convolution, decay and norm."""
    part = spec.linear
    if part is None:
        return 0, 0
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    matrices = spec.hidden * (2 * keys + 3 * values + 2 * part.value_heads)
    return matrices, (2 * keys + values) * part.conv + 2 * part.value_heads + part.value_dim


def mlp(spec: ModelSpec, *, dense: bool, active: bool) -> int:
    """Parameters of one MLP.

    Args:
        dense: of one of the leading layers of a mixture-of-experts model.
        active: only the experts that one token passes through.
    """
    moe = spec.moe
    if moe is None or dense:
        return 3 * spec.hidden * spec.ffn
    experts = moe.top_k if active else moe.experts
    shared = 3 * spec.hidden * moe.shared_ffn + (spec.hidden if moe.shared_gate else 0)
    return 3 * spec.hidden * moe.ffn * experts + shared + spec.hidden * moe.experts


def decoder(spec: ModelSpec, *, active: bool) -> tuple[int, int]:
    """Parameters of all decoder layers: of matrices (of those a token passes through), of everything else."""
    full, dense = full_layers(spec), spec.moe.dense_layers if spec.moe else 0
    parts = [(attention(spec), full), (gated_delta(spec), spec.layers - full), (indexer(spec), index_layers(spec))]
    matrices = sum(part[0] * count for part, count in parts)
    matrices += dense * mlp(spec, dense=True, active=active)
    matrices += (spec.layers - dense) * mlp(spec, dense=False, active=active)
    norms = spec.layers * spec.hidden * (4 if spec.sandwich else 2)
    return matrices, norms + sum(part[1] * count for part, count in parts)


def params(spec: ModelSpec, *, active: bool = False) -> int:
    """All parameters, or those that one token passes through; a tied output layer counts once."""
    return sum(decoder(spec, active=active)) + spec.hidden + spec.vocab * spec.hidden * (1 if spec.tied else 2)


def mtp_params(spec: ModelSpec) -> int:
    """Parameters of the multi-token-prediction layers.

    Each is a full-attention decoder layer, a projection of [embedding; hidden], and three norms. The copies of
    embedding and output layer that some repositories store with it are those of the decoder and do not count again.
    """
    one = sum(attention(spec)) + sum(indexer(spec)) + mlp(spec, dense=False, active=False)
    norms = spec.hidden * (4 if spec.sandwich else 2)
    return spec.mtp * (one + norms + 2 * spec.hidden * spec.hidden + 3 * spec.hidden)


def matmul_params(spec: ModelSpec) -> int:
    """Parameters that take part in a matrix product for every token, output layer included."""
    return decoder(spec, active=True)[0] + spec.vocab * spec.hidden


def cache_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that one token of context takes in the KV cache, over all layers.

    Latent attention keeps the compressed vector and the rotary key, an indexer one key per layer that computes indices;
    gated-delta layers keep nothing per token, see `state_bytes`.
    """
    mla = spec.mla
    width = 2 * spec.kv_heads * spec.head_dim if mla is None else mla.kv_rank + mla.rope_dim
    keys = index_layers(spec) * spec.indexer.head_dim if spec.indexer else 0
    return (full_layers(spec) * width + keys) * BYTES[dtype]


def state_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that one sequence takes whatever its length: per gated-delta layer a state (float32) and the convolution's
    last inputs."""
    part = spec.linear
    if part is None:
        return 0
    state = part.value_heads * part.key_dim * part.value_dim * BYTES["float32"]
    channels = 2 * part.key_heads * part.key_dim + part.value_heads * part.value_dim
    return (spec.layers - full_layers(spec)) * (state + channels * (part.conv - 1) * BYTES[dtype])


def attention_flops(spec: ModelSpec, context: int) -> int:
    """Operations of one token outside the weight matrices: scores and values over `context` tokens, and in gated-delta
    layers the convolution and the state (decay, read, write and output: seven operations per entry)."""
    mla, part, index = spec.mla, spec.linear, spec.indexer
    width = 2 * spec.head_dim if mla is None else mla.qk_dim + mla.v_dim
    seen = min(context, index.top_k) if index else context
    total = full_layers(spec) * 2 * spec.heads * width * seen
    if index:
        total += index_layers(spec) * 2 * index.heads * index.head_dim * context
    if part:
        channels = 2 * part.key_heads * part.key_dim + part.value_heads * part.value_dim
        one = 7 * part.value_heads * part.key_dim * part.value_dim + 2 * channels * part.conv
        total += (spec.layers - full_layers(spec)) * one
    return total


def activation_width(spec: ModelSpec) -> int:
    """Numbers that one token leaves behind in the widest layer until its backward pass, as a rough estimate."""
    inner = spec.ffn
    if spec.moe:
        routed = spec.moe.top_k * spec.moe.ffn + spec.moe.shared_ffn
        inner = max(routed, spec.ffn if spec.moe.dense_layers else 0)
    return 12 * spec.hidden + 4 * inner
