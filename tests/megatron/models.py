"""Tiny models of the families that megatron-core has modules for: HF folder, and megatron-core's own model of it.

`megatron_model` reads config.json by itself: nothing of slime takes part in building what slime's checkpoints are
loaded into.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors.torch import load_file

from tests.megatron.harness import World
from tests.models import as_on_the_hub, tiny_model

PADDED = 384
"""rows of Megatron's embedding for the 300 of the tiny models"""


def hub_folder(folder: Path, family: str, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A tiny model as its repository would have it, prediction layer included."""
    if family == "glm_moe_dsa":
        # half of an indexer's head is rotary, as in the published model
        changes = {"index_head_dim": 16, **changes}
    return as_on_the_hub(tiny_model(folder, family, dtype=dtype, **changes), family)


def config_of(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder."""
    return load_file(folder / "model.safetensors")


def transformer_config(config: dict[str, Any], world: World, dtype: torch.dtype, **changes: Any) -> TransformerConfig:
    """megatron-core's config of an HF config."""
    mla = "kv_lora_rank" in config
    arguments: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "perform_initialization": False,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": world.tp,
        "pipeline_model_parallel_size": world.pp,
        "expert_model_parallel_size": world.ep,
        "expert_tensor_parallel_size": world.etp,
        "sequence_parallel": world.tp > 1 and is_moe(config),
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
    }
    if world.pp > 1:
        # three layers do not divide by two
        arguments |= {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}
    if mla:
        arguments |= _mla_arguments(config)
    else:
        arguments |= {
            "num_query_groups": config["num_key_value_heads"],
            "kv_channels": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
            "add_qkv_bias": config["model_type"] in ("qwen2", "mimo", "qwen2_moe")
            or config.get("attention_bias", False),
            "qk_layernorm": config["model_type"] in ("qwen3", "qwen3_moe") or config.get("use_qk_norm", False),
        }
    if is_moe(config):
        arguments |= _moe_arguments(config)
    return (MLATransformerConfig if mla else TransformerConfig)(**{**arguments, **changes})


def _mla_arguments(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": config["rope_parameters"]["rope_theta"],
    }


def is_moe(config: dict[str, Any]) -> bool:
    """Whether it is a mixture of experts."""
    return "moe_intermediate_size" in config or "num_local_experts" in config


def experts_of(config: dict[str, Any]) -> int:
    """Routed experts per layer."""
    return next(int(config[k]) for k in ("num_experts", "n_routed_experts", "num_local_experts") if k in config)


def _moe_arguments(config: dict[str, Any]) -> dict[str, Any]:
    arguments = {
        "num_moe_experts": experts_of(config),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": True,
    }
    if config["model_type"] == "qwen2_moe":
        arguments |= {
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    if "n_routed_experts" in config:
        dense = config["first_k_dense_replace"]
        arguments |= {
            "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        }
    return arguments


def megatron_model(
    config: dict[str, Any], world: World, dtype: torch.dtype = torch.float32, **changes: Any
) -> GPTModel:
    """This rank's part of megatron-core's model; its weights are NaN until something is loaded."""
    settings = transformer_config(config, world, dtype, **changes)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    mtp = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=True) if settings.mtp_num_layers else None
    model = GPTModel(
        settings,
        spec,
        vocab_size=PADDED,
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config["rope_parameters"]["rope_theta"]),
        rotary_percent=config["rope_parameters"].get("partial_rotary_factor", 1.0),
        parallel_output=False,
        mtp_block_spec=mtp,
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and "extra_state" not in name:
                tensor.fill_(float("nan"))
    return model.eval()
