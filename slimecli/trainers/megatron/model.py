"""ModelSpec -> this rank's part of a megatron-core model, with Transformer Engine's parameter names.

The last stage hands out hidden states instead of logits: log-probs are computed from them in chunks (log_probs.py), so
that the logits of a micro-batch are never held.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimecli.data_tools.hooks import load_hook
from slimecli.errors import UsageError
from slimecli.model_specs import ModelSpec, RopeScaling
from slimecli.trainers.megatron import optimizer, shares
from slimecli.trainers.megatron.arguments import Settings
from slimecli.trainers.megatron.critic import ValueHead


def build_chunks(
    spec: ModelSpec, settings: Settings, device: torch.device, *, with_value_head: bool = False
) -> list[Any]:
    """The model chunks of this rank (one, or several with interleaved pipelining), uninitialised.

    Process groups must have been made.

    Args:
        with_value_head: for a critic, which has one number per token in place of the output layer.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not _has_transformer_engine():
        from slimecli.trainers.megatron import stand_ins

        stand_ins.install()
    optimizer.install()
    config = make_config(spec, settings)
    count = settings.layout.vpp
    chunks = []
    for stage in range(count):
        if count > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunk = _chunk(spec, settings, config, stage if count > 1 else None, with_value_head).to(device)
        if spec.moe and spec.moe.score == "sigmoid" and not spec.moe.normalize:
            from slimecli.trainers.megatron.layers import keep_scores

            keep_scores(chunk, spec.moe.scale)
        _mark_split(chunk)
        _mark_experts(chunk, settings)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def _mark_split(chunk: Any) -> None:
    """Say of each weight whether tensor-parallel ranks hold parts of it, which megatron-core itself only does while
    drawing initial values, and no values are drawn here. Gradient norms count unmarked weights once per group."""
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )

    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for name, module in chunk.named_modules():
        # Transformer Engine says it of all its weights; those of experts it takes for whole, and they are parts
        if getattr(module, "parallel_mode", "") is None and ".experts." not in f".{name}.":
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = False
        axis = next((a for kind, a in axes.items() if isinstance(module, kind)), None)
        if axis is None or getattr(module, "weight", None) is None:
            continue
        bias = getattr(module, "bias", None)
        split = [module.weight] + ([bias] if bias is not None and axis == 0 else [])
        for parameter in split:
            if not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)


def _mark_experts(chunk: Any, settings: Settings) -> None:
    """Say over which ranks the gradients of experts are summed: those that hold the same expert. megatron-core 0.16
    overlooks that tensor-parallel ranks may do so too (no expert parallelism, smaller expert tensor parallelism)."""
    layout = settings.layout
    as_others = layout.ep == 1 and layout.etp == layout.tp
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = as_others


def padded_vocab(spec: ModelSpec, settings: Settings) -> int:
    """Rows of Megatron's embedding: a multiple of 128, whatever the layout, so that checkpoints fit every other one."""
    return shares.padded_vocab(spec, settings.layout.tp)


def make_config(spec: ModelSpec, settings: Settings) -> Any:
    """megatron-core's TransformerConfig."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    numbers = {**_numbers(spec), **_objects(settings.transformer)}
    try:
        return (MLATransformerConfig if spec.mla else TransformerConfig)(**numbers)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(
            f"megatron-core refuses what [megatron] says: {error}", "`docs/megatron.md` lists what [megatron] takes"
        ) from error


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings name dtypes and kernels; megatron-core wants objects."""
    from megatron.core.transformer.enums import AttnBackend

    dtypes = ("params_dtype", "pipeline_dtype", "autocast_dtype")
    found = {k: getattr(torch, v) if k in dtypes and isinstance(v, str) else v for k, v in fields.items()}
    kernel = found.get("attention_backend")
    if isinstance(kernel, str):
        names = [b.name for b in AttnBackend]
        if kernel not in names:
            raise UsageError(f"[megatron] attention_backend = {kernel!r}", f"one of {', '.join(names)}")
        found["attention_backend"] = AttnBackend[kernel]
    return found


def _numbers(spec: ModelSpec) -> dict[str, Any]:
    """TransformerConfig fields that follow from the model."""
    fields: dict[str, Any] = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.eps,
        "layernorm_zero_centered_gamma": spec.unit_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "perform_initialization": False,
    }
    fields |= _latent(spec) if spec.mla else _grouped(spec)
    if spec.moe:
        fields |= _experts(spec)
    return fields


def _grouped(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": bool(spec.qk_norm),
        "rotary_interleaved": spec.interleaved,
        "attention_output_gate": spec.gated,
    }


def _latent(spec: ModelSpec) -> dict[str, Any]:
    mla, scaling = spec.mla, spec.rope_scaling
    assert mla is not None
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rotary_base": spec.rope_theta,
    }
    if scaling is None:
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale or 1.0,
        "mscale_all_dim": scaling.mscale_all_dim,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    return {
        "num_moe_experts": moe.experts,
        "moe_layer_freq": [0] * moe.dense_layers + [1] * (spec.layers - moe.dense_layers),
        "moe_ffn_hidden_size": moe.ffn,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        # softmax over the chosen experts only is softmax over all, normalised
        "moe_router_pre_softmax": moe.score == "sigmoid" or not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scale if moe.scale != 1.0 else None,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.top_groups if moe.groups > 1 else None,
        "moe_router_enable_expert_bias": moe.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": True,
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _chunk(spec: ModelSpec, settings: Settings, config: Any, stage: int | None, with_value_head: bool) -> Any:
    """One GPTModel."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    block = _layer_specs(spec, settings, config, stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab(spec, settings),
        max_sequence_length=spec.max_positions,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=spec.tied and not with_value_head,
        position_embedding_type="rope",
        rotary_percent=spec.rotary,
        rotary_base=spec.rope_theta,
        vp_stage=stage,
    )
    if spec.mla is None and spec.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = scaled_frequencies(model.rotary_pos_emb.inv_freq, spec.rope_scaling)
    if last and with_value_head:
        model.output_layer = ValueHead(config)
    elif last:
        model.output_layer.forward = _hand_through
        if settings.prediction:
            from slimecli.trainers.megatron.heads import make_block

            model.mtp = make_block(model, block.layer_specs[-1], spec.mtp, stage)
    return model


def _hand_through(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """In place of the output layer."""
    return hidden, None


def _layer_specs(spec: ModelSpec, settings: Settings, config: Any, stage: int | None) -> Any:
    if settings.layer_spec:
        return load_hook(settings.layer_spec, ("config", "vp_stage"))(config, stage)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    if not (spec.sandwich or spec.qk_norm == "full" or spec.linear):
        return block
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from slimecli.trainers.megatron import layers

    return layers.adapt(block, spec, get_transformer_layer_offset(config, vp_stage=stage))


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """[head_dim / 2] rotary frequencies of long-context Llama 3.1 (its config's rope_type `llama3`).

    Wavelengths beyond original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor
    are left, and those between are interpolated.
    """
    if scaling.rope_type != "llama3":
        raise UsageError(f"rope scaling {scaling.rope_type!r} without latent attention", "only llama3 scaling is known")
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((turns - scaling.low_freq_factor) / spread).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
