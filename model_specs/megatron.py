"""The Megatron-LM arguments of a model, by flag name without dashes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimecli.model_specs.spec import ModelSpec


def arguments(spec: ModelSpec) -> dict[str, Any]:
    """Everything that describes the model; True marks a flag without a value, a list a literal Python list.

    `post-self-attn-layernorm` and `post-mlp-layernorm` exist only where slime's Megatron patch is applied. What says
    how to compute rather than what (fusions, precision of the softmax, dropping of tokens) is left to the user.
    """
    args: dict[str, Any] = {
        "num-layers": spec.layers,
        "hidden-size": spec.hidden,
        "ffn-hidden-size": spec.ffn,
        "num-attention-heads": spec.heads,
        "vocab-size": spec.vocab,
        "max-position-embeddings": spec.max_positions,
        "normalization": "RMSNorm",
        "norm-epsilon": spec.eps,
        "swiglu": True,
        "disable-bias-linear": True,
        **_attention(spec),
        **_rope(spec),
    }
    if spec.moe:
        args |= _experts(spec)
    if spec.sandwich:
        args |= {"post-self-attn-layernorm": True, "post-mlp-layernorm": True}
    if spec.unit_norms:
        args["apply-layernorm-1p"] = True
    if spec.mtp:
        args["mtp-num-layers"] = spec.mtp
    if not spec.tied:
        args["untie-embeddings-and-output-weights"] = True
    return args


def _attention(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    if mla is not None:
        ranks = {"q-lora-rank": mla.q_rank} if mla.q_rank else {}
        return {
            "multi-latent-attention": True,
            "kv-channels": mla.nope_dim,
            **ranks,
            "kv-lora-rank": mla.kv_rank,
            "qk-head-dim": mla.nope_dim,
            "qk-pos-emb-head-dim": mla.rope_dim,
            "v-head-dim": mla.v_dim,
            "qk-layernorm": True,
        }
    args: dict[str, Any] = {
        "group-query-attention": True,
        "num-query-groups": spec.kv_heads,
        "kv-channels": spec.head_dim,
    }
    flags = {"add-qkv-bias": spec.qkv_bias, "qk-layernorm": bool(spec.qk_norm), "attention-output-gate": spec.gated}
    return args | {flag: True for flag, wanted in flags.items() if wanted}


def _rope(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rope_scaling
    args: dict[str, Any] = {
        "position-embedding-type": "rope",
        "rotary-base": int(spec.rope_theta),
        "rotary-percent": spec.rotary,
    }
    if spec.interleaved or spec.qk_norm == "full":  # Megatron's fused kernel knows neither
        args["no-rope-fusion"] = True
    if spec.mla is None:
        args["use-rotary-position-embeddings"] = True
        if spec.interleaved:
            args["rotary-interleaved"] = True
    elif scaling is None:  # Megatron applies yarn to latent attention unless told otherwise
        args["rope-type"] = "rope"
    if scaling is None:
        return args
    if scaling.rope_type == "llama3":
        return args | {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    args |= {"rotary-scaling-factor": scaling.factor, "mscale": scaling.mscale or 1.0}
    args["mscale-all-dim"] = scaling.mscale_all_dim
    if spec.mla is not None:  # no flag for the rest: Megatron takes 4096 positions, beta_fast 32 and beta_slow 1
        return args | {"rope-type": "yarn"}
    return args | {
        "position-embedding-type": "yarn",
        "yarn-original-max-position-embeddings": scaling.original_max_positions,
        "yarn-beta-fast": scaling.beta_fast,
        "yarn-beta-slow": scaling.beta_slow,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    args: dict[str, Any] = {
        "num-experts": moe.experts,
        "moe-layer-freq": [0] * moe.dense_layers + [1] * (spec.layers - moe.dense_layers),
        "moe-ffn-hidden-size": moe.ffn,
        "moe-router-topk": moe.top_k,
        "moe-router-score-function": moe.score,
        "moe-router-dtype": "fp32",
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": True,
        "moe-permute-fusion": True,
        "moe-aux-loss-coeff": 0,
    }
    if moe.shared_ffn:
        args["moe-shared-expert-intermediate-size"] = moe.shared_ffn
    if moe.shared_gate:
        args["moe-shared-expert-gate"] = True
    if moe.score == "sigmoid" or not moe.normalize:
        args["moe-router-pre-softmax"] = True
    if moe.bias:
        args |= {"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": 0}
        args["moe-router-load-balancing-type"] = "seq_aux_loss"
    if moe.scale != 1.0:
        args["moe-router-topk-scaling-factor"] = moe.scale
    if moe.groups > 1:
        args |= {"moe-router-num-groups": moe.groups, "moe-router-group-topk": moe.top_groups}
    return args


def command_line(spec: ModelSpec) -> str:
    """The arguments as Megatron's command line takes them."""
    words = []
    for flag, value in arguments(spec).items():
        words.append(f"--{flag}")
        if isinstance(value, list):  # which layers have experts: the dense ones come first
            words.append(f"'[0]*{value.count(0)}+[1]*{value.count(1)}'")
        elif value is not True:
            words.append(str(value))
    return " ".join(words)
