"""Arguments that megatron-core has and slime's trainer cannot mean: told with the reason, before anything starts.

Taken silently, some would train another network than the engine samples from, some would scale the loss wrongly, some
would have no effect, and some would fail once every process has started.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from slimecli.model_specs import ModelSpec

NETWORK = frozenset(
    {
        *("softmax_scale", "softmax_type", "apply_residual_connection_post_layernorm", "glu_linear_offset"),
        *("activation_func_clamp_value", "window_size", "window_attn_skip_freq", "qk_l2_norm", "qk_clip"),
        *("attention_output_gate", "no_rope_freq", "experimental_attention_variant", "dsa_indexer_n_heads"),
        *("dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
        *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "mrope_section", "is_hybrid_model", "mamba_num_heads"),
        *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "moe_latent_size", "moe_apply_probs_on_input"),
        *("use_fused_weighted_squared_relu", "heterogeneous_block_specs", "multi_latent_attention"),
    }
)
"""what a model computes, which its folder says; an own layer spec may ask for it"""
_ROUTES = frozenset(
    {
        *("moe_router_force_load_balancing", "moe_input_jitter_eps", "moe_token_dropping"),
        *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_router_topk_limited_devices"),
    }
)
_AUXILIARY = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
_STAGES = (
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)
_ELSEWHERE = {
    "use_megatron_fsdp": "slime's FSDP is trainer.backend = 'fsdp'",
    "use_custom_fsdp": "slime's FSDP is trainer.backend = 'fsdp'",
    "hybrid_context_parallel": "samples are divided over context-parallel ranks evenly",
    "average_in_collective": "losses carry global denominators: gradients are summed, never averaged",
    "overlap_moe_expert_parallel_comm": "it needs a schedule of passes that slime does not have",
    "delay_wgrad_compute": "it needs a schedule of passes that slime does not have",
    "ep_overlap_early_attn_memory_release": "it needs a schedule of passes that slime does not have",
    "defer_embedding_wgrad_compute": "slime computes the output layer's gradient itself, in chunks",
    "overlap_param_gather_with_optimizer_step": "it needs a schedule of passes that slime does not have",
    "tp_comm_overlap": "its buffers are of one length, and packed micro-batches differ in it",
    "cuda_graph_impl": "graphs are recorded for one length, and packed micro-batches differ in it",
    "enable_cuda_graph": "graphs are recorded for one length, and packed micro-batches differ in it",
    "external_cuda_graph": "graphs are recorded for one length, and packed micro-batches differ in it",
    **dict.fromkeys(
        ("fp8_param", "fp8_param_gather", "fp4_param"),
        "weights are read, swapped and published in pieces, which quantised ones are not stored in",
    ),
    "use_te_rng_tracker": "only recorded graphs need it",
    "cache_mla_latents": "it is for generation, which engines do",
    "flash_decode": "it is for generation, which engines do",
    "use_inference_optimized_layers": "it is for generation, which engines do",
    "inference_fuse_tp_communication": "it is for generation, which engines do",
    "loss_scale": "only float16 needs it, which slime does not train in",
    "test_mode": "it is for tests of megatron-core itself",
    "mtp_standalone": "prediction layers are in the last pipeline stage",
}
"""argument -> why it is not taken"""
_FIXED = {
    "optimizer": ("adam", "checkpoints and memory plans are those of Adam"),
    "transformer_impl": ("transformer_engine", "parameters keep Transformer Engine's names, with it or without"),
    "num_distributed_optimizer_instances": (1, "the optimizer is divided over all data-parallel processes"),
}
"""argument -> (the value that it has, why)"""


def refused(given: Mapping[str, Any], spec: ModelSpec, *, own_layers: bool) -> Iterator[str]:
    """Why arguments are not taken.

    Args:
        given: [megatron] by megatron-core's field names.
        own_layers: `[megatron] spec` makes the layers.
    """
    for name, value in given.items():
        reason = _reason(name, value, spec, own_layers)
        if reason:
            yield f"[megatron] {name} = {value!r}: {reason}"
    if not given.get("fp8"):
        effects = ("fp8_", "moe_router_padding_for_")
        without = [n for n, v in given.items() if v and n.startswith(effects) and n not in _ELSEWHERE]
        yield from (f"[megatron] {name} has no effect without fp8" for name in without)
    if not given.get("fp4"):
        without = [n for n, v in given.items() if v and n.startswith("fp4_") and n not in _ELSEWHERE]
        yield from (f"[megatron] {name} has no effect without fp4" for name in without)


def _reason(name: str, value: Any, spec: ModelSpec, own_layers: bool) -> str:
    """Why one value is not taken; empty: it is."""
    if name in _FIXED:
        fixed, why = _FIXED[name]
        return "" if value == fixed else f"it is always {fixed!r}: {why}"
    if name == "moe_router_load_balancing_type":
        kinds = value if isinstance(value, list) else [value]
        wrong = [kind for kind in kinds if kind not in _BALANCING]
        return f"{wrong[0]!r} is not one of {', '.join(_BALANCING)}" if wrong else ""
    if name == "moe_token_dispatcher_type" and value == "flex" and importlib.util.find_spec("deep_ep") is None:
        return "it needs DeepEP, which is not installed; take 'alltoall'"
    if not value or value in ("vanilla", "none") or (isinstance(value, list) and not any(value)):
        return ""
    if name in NETWORK and not own_layers:
        return f"what {spec.name} computes follows from its folder; leave it out"
    if name in _ROUTES:
        return "tokens would pass through other experts than in the engine; leave it out"
    if name in _AUXILIARY:
        return "auxiliary losses have no place in a loss with global denominators; only 0 is taken"
    if name in _STAGES:
        return "uneven stages are said by decoder-first-pipeline-num-layers and decoder-last-pipeline-num-layers"
    return f"{_ELSEWHERE[name]}; leave it out" if name in _ELSEWHERE else ""
