"""Recipe + model -> everything megatron-core is configured with, each forced value with its reason.

Names in `[megatron]` are Megatron-LM's flags, with dashes or underscores. Neither torch nor Megatron is imported, so
`slime plan` can do it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slimecli.errors import UsageError, nearest
from slimecli.model_specs import ModelSpec
from slimecli.recipe import Recipe
from slimecli.static import hook_problem
from slimecli.trainers.megatron.fields import known_fields, takes_object, type_problem
from slimecli.trainers.megatron.layout import SIZES, Layout, field_name, problems
from slimecli.trainers.megatron.refusals import refused

_RECIPE = {
    "lr": "trainer.lr",
    "min_lr": "trainer.min_lr_ratio",
    "decoupled_lr": "trainer.lr",
    "decoupled_min_lr": "trainer.min_lr_ratio",
    "weight_decay": "trainer.weight_decay",
    "clip_grad": "trainer.clip_grad",
    "adam_beta1": "trainer.beta1",
    "adam_beta2": "trainer.beta2",
    "adam_eps": "trainer.adam_eps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "params_dtype": "model.dtype",
    "micro_batch_size": "trainer.max_tokens_per_micro_batch",
    "global_batch_size": "trainer.global_batch_size",
    "seed": "seed",
    "load": "model.path",
    "save": "the run directory",
    "lr_decay_style": "trainer.lr_schedule",
    "lr_warmup_iters": "trainer.warmup_steps",
    "lr_decay_iters": "steps",
    "train_iters": "steps",
    "save_interval": "checkpoint.interval",
    "eval_interval": "eval.interval",
    "max_tokens_per_gpu": "trainer.max_tokens_per_micro_batch",
    "tokenizer_model": "model.path",
    "hf_checkpoint": "model.path",
}
"""flag -> where the recipe says it"""
FROM_MODEL = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "gated_linear_unit"),
        *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "rotary_interleaved", "multi_latent_attention"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_base"),
        *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
        *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    }
)
"""TransformerConfig fields that follow from the ModelSpec, so that weights fit"""
_ALIASES = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "bias_gelu_fusion": "bias_activation_fusion",
    "bias_swiglu_fusion": "bias_activation_fusion",
    "rope_fusion": "apply_rope_fusion",
}
"""Megatron-LM's flag -> megatron-core's field, where they differ"""
PREDICTION = "mtp_loss_scaling_factor"
"""the flag that has prediction layers trained"""
DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("use_distributed_optimizer", True, "optimizer state is divided over data-parallel processes"),
    ("grad_reduce_in_fp32", True, "gradients are added up in float32 whatever the weights are"),
    ("moe_token_dispatcher_type", "alltoall", "micro-batches differ in length, which `allgather` cannot have"),
    (PREDICTION, 0.0, "multi-token-prediction layers stay as the model's folder has them unless it is above 0"),
)
"""(field, value, reason) of what slime sets unless [megatron] says otherwise"""
NEEDS_GPU = (
    *("gradient_accumulation_fusion", "optimizer_cpu_offload", "cpu_offloading", "nccl_ub"),
    *("use_precision_aware_optimizer", "symmetric_ar_type", "batch_invariant_mode", "use_kitchen"),
    *("use_kitchen_attention", "fused_single_qkv_rope", "use_ring_exchange_p2p"),
)
NEEDS_TRANSFORMER_ENGINE = (
    *("fp8", "fp4", "cpu_offloading", "moe_permute_fusion", "moe_router_fusion", "use_te_activation_func"),
    *("fine_grained_activation_offloading", "use_precision_aware_optimizer"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a Megatron trainer is built from. Dtypes are names, functions are left to the builder."""

    layout: Layout
    transformer: Mapping[str, Any]
    """TransformerConfig (MLATransformerConfig) fields"""
    ddp: Mapping[str, Any]
    """DistributedDataParallelConfig fields"""
    optimizer: Mapping[str, Any]
    """OptimizerConfig fields"""
    layer_spec: str = ""
    """`module:function` that makes the layer spec instead of slime; empty: slime's"""
    forced: tuple[tuple[str, Any, str], ...] = ()
    """(field, value, reason) of what the backend decides"""

    @property
    def prediction(self) -> float:
        """Weight of the prediction layers' loss; 0: they are not trained."""
        return float(self.transformer[PREDICTION] or 0.0)


@dataclass(frozen=True)
class _Reading:
    given: Mapping[str, Any]
    layer_spec: str
    layout: Layout
    forced: list[tuple[str, Any, str]]
    errors: list[str]


def problems_of(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> list[str]:
    """All errors of `[megatron]`: an unknown name with the nearest, a value that belongs to the recipe or the model, or
    that the others contradict, a layout that the model cannot be divided into."""
    return _read(recipe, spec, on_gpu).errors


def settings_of(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> Settings:
    """What the trainer is built from. Raises UsageError with all that `problems_of` finds."""
    reading = _read(recipe, spec, on_gpu)
    if reading.errors:
        raise UsageError("; ".join(reading.errors), "`docs/megatron.md` lists what [megatron] takes")
    parts: dict[str, dict[str, Any]] = {
        "transformer": _transformer(recipe, on_gpu),
        "ddp": {},
        "optimizer": _optimizer(recipe, on_gpu),
    }
    values = {name: value for name, value, _ in DEFAULTS}
    values |= {name: value for name, value in reading.given.items() if name not in SIZES}
    values |= {name: value for name, value, _ in reading.forced} | _layout_fields(reading.layout)
    for part, known in known_fields().items():
        parts[part] |= {name: value for name, value in values.items() if name in known}
    return Settings(layout=reading.layout, layer_spec=reading.layer_spec, forced=tuple(reading.forced), **parts)


def without_prediction(recipe: Recipe) -> Recipe:
    """The recipe of a model whose prediction layers are not trained, whatever the policy's are."""
    kept = {name: value for name, value in recipe.megatron.items() if field_name(name) != PREDICTION}
    return recipe.model_copy(update={"megatron": kept})


def _read(recipe: Recipe, spec: ModelSpec, on_gpu: bool) -> _Reading:
    given, errors = _arguments(recipe, spec)
    layer_spec = str(given.pop("spec", ""))
    if layer_spec:
        problem = hook_problem(layer_spec)
        errors += [f"[megatron] spec = {problem}"] if problem else []
    elif what := _lacking(spec):
        errors.append(f"{spec.name} has {what}, which needs trainer.backend = 'fsdp' or an own [megatron] spec")
    layout = Layout(world=recipe.trainer.processes)
    if not errors:
        layout, errors = _layout(given, recipe.trainer.processes, spec)
    forced = _forced(layout, on_gpu)
    if not errors:
        errors = [*problems(spec, layout), *_contradictions(given, recipe, on_gpu)]
        errors += _prediction(given, recipe, spec, layer_spec) if given.get(PREDICTION) else []
        errors += [
            f"[megatron] {name} = {given[name]!r}: slime sets {value!r}, since {reason}; leave it out"
            for name, value, reason in forced
            if name in given and given[name] != value
        ]
    return _Reading(given, layer_spec, layout, forced, errors)


def _arguments(recipe: Recipe, spec: ModelSpec) -> tuple[dict[str, Any], list[str]]:
    """([megatron] by megatron-core's field names, what is wrong with single arguments)."""
    model = {k.replace("-", "_") for k in spec.megatron_args()}
    known = {n for names in known_fields().values() for n in names} | set(SIZES) | set(_ALIASES) | {"spec"}
    given: dict[str, Any] = {}
    errors = []
    for said, stated in recipe.megatron.items():
        name, value = field_name(said), stated
        if name not in known and name.removeprefix("no_") in known and value is True:
            name, value = name.removeprefix("no_"), False
        if name == "recompute_activations":
            name, value = "recompute_granularity", "selective"
        field = _ALIASES.get(name, name)
        if name in _RECIPE:
            errors.append(f"[megatron] {said}: the recipe says that in {_RECIPE[name]}")
        elif field in FROM_MODEL or (name in model and not name.startswith("moe_")):
            errors.append(f"[megatron] {said}: it follows from the model ({spec.name})")
        elif name not in known:
            flags = sorted(k.replace("_", "-") if "-" in said else k for k in known if not takes_object(k))
            errors.append(f"[megatron] {said} is no argument of the installed megatron-core{nearest(said, flags)}")
        elif field in given:
            errors.append(f"[megatron] {said}: {field} is given twice")
        else:
            given[field] = value
            problem = _size_problem(field, value) if field in SIZES else type_problem(field, value)
            errors += [problem] if problem else []
    values = {name: value for name, value in given.items() if name != "spec"}
    return given, [*errors, *refused(values, spec, own_layers="spec" in given)]


def _size_problem(field: str, value: Any) -> str:
    if field == "sequence_parallel":
        return "" if isinstance(value, bool) else f"[megatron] {field} = {value!r}: it takes true or false"
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return "" if is_size else f"[megatron] {field} = {value!r}: it takes a whole number above 0"


def _lacking(spec: ModelSpec) -> str:
    """What a model has that slime's layers for megatron-core have not; empty: nothing."""
    if spec.indexer:
        return "a sparse-attention indexer"
    if spec.moe and spec.moe.groups > 1 and spec.moe.top_k // spec.moe.top_groups != 2:
        # groups are ranked by their two best experts, in megatron-core by top_k / top_groups of them
        return f"{spec.moe.top_k} experts of {spec.moe.top_groups} groups per token (not two of each)"
    return ""


def _layout(given: Mapping[str, Any], world: int, spec: ModelSpec) -> tuple[Layout, list[str]]:
    sizes = {SIZES[k]: v for k, v in given.items() if SIZES.get(k)}
    sizes.setdefault("etp", sizes.get("tp", 1))
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk:
        per_stage = spec.layers // sizes.get("pp", 1)
        if "vpp" in sizes or per_stage % per_chunk:
            return Layout(world=world), [
                f"[megatron] num_layers_per_virtual_pipeline_stage = {per_chunk}: a stage has {per_stage} layers; "
                "give a divisor of that, and no other number of chunks"
            ]
        sizes["vpp"] = per_stage // per_chunk
    return Layout(world=world, **sizes), []


def _contradictions(given: Mapping[str, Any], recipe: Recipe, on_gpu: bool) -> Iterator[str]:
    """Arguments that megatron-core would refuse, or ignore, once all processes have started."""
    granularity = given.get("recompute_granularity")
    details = [n for n in ("recompute_method", "recompute_num_layers") if n in given]
    if granularity and recipe.trainer.activation_checkpointing:
        yield "[megatron] recompute_granularity and trainer.activation_checkpointing = true: keep one of them"
    elif granularity == "full" and len(details) < 2:
        yield (
            "[megatron] recompute_granularity = 'full' needs recompute_method ('uniform' or 'block') and "
            "recompute_num_layers"
        )
    elif granularity != "full" and details:
        yield f"[megatron] {details[0]} has no effect without recompute_granularity = 'full'"
    if "recompute_modules" in given and granularity != "selective":
        yield "[megatron] recompute_modules has no effect without recompute_granularity = 'selective'"
    if recipe.trainer.bridge == "mbridge" and importlib.util.find_spec("mbridge") is None:
        yield "trainer.bridge = 'mbridge', which is not installed: pip install mbridge, or set it to 'slime'"
    if given.get("overlap_param_gather") and not given.get("overlap_grad_reduce"):
        yield "[megatron] overlap_param_gather needs overlap_grad_reduce = true"
    if given.get("overlap_param_gather") and not given.get("use_distributed_optimizer", True):
        yield "[megatron] overlap_param_gather needs use_distributed_optimizer = true"
    yield from _offloading(given, recipe)
    if given.get("distribute_saved_activations") and given.get("sequence_parallel"):
        yield "[megatron] distribute_saved_activations and sequence_parallel: keep one of them"
    if given.get("moe_token_dispatcher_type") == "allgather":
        yield "[megatron] moe_token_dispatcher_type = 'allgather': micro-batches differ in length; take 'alltoall'"
    if given.get("moe_enable_routing_replay") and given.get("moe_router_fusion"):
        yield "[megatron] moe_enable_routing_replay has no effect with moe_router_fusion: keep one of them"
    if given.get("moe_enable_deepep") and given.get("moe_token_dispatcher_type") != "flex":
        yield "[megatron] moe_enable_deepep needs moe_token_dispatcher_type = 'flex'"
    if given.get("fp8") and given.get("fp4"):
        yield "[megatron] fp8 and fp4: keep one of them"
    wanted = [name for name, value in given.items() if value and value != "none"]
    if not on_gpu:
        there = (*NEEDS_GPU, *NEEDS_TRANSFORMER_ENGINE)
        yield from (f"[megatron] {name} needs a GPU, and there is none here" for name in wanted if name in there)
        return
    if importlib.util.find_spec("transformer_engine") is None:
        missing = (name for name in wanted if name in NEEDS_TRANSFORMER_ENGINE)
        yield from (f"[megatron] {name} needs Transformer Engine, which is not installed" for name in missing)
        fused = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        if given.get("gradient_accumulation_fusion") and not fused:
            yield "[megatron] gradient_accumulation_fusion needs Transformer Engine or Apex; neither is installed"


def _offloading(given: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """What an optimizer in host memory cannot do without, and what cannot do without it."""
    fraction = given.get("optimizer_offload_fraction", 0.0)
    if not given.get("optimizer_cpu_offload"):
        if fraction:
            yield "[megatron] optimizer_offload_fraction has no effect without optimizer_cpu_offload = true"
        return
    if not fraction:
        yield "[megatron] optimizer_cpu_offload needs optimizer_offload_fraction, the share that goes, above 0 up to 1"
    if not given.get("use_distributed_optimizer", True):
        yield "[megatron] optimizer_cpu_offload needs use_distributed_optimizer = true"
    if recipe.model.dtype != "bfloat16":
        yield f"[megatron] optimizer_cpu_offload needs model.dtype = 'bfloat16', not {recipe.model.dtype!r}"
    if given.get("use_precision_aware_optimizer"):
        yield "[megatron] optimizer_cpu_offload and use_precision_aware_optimizer: keep one of them"


def _prediction(given: Mapping[str, Any], recipe: Recipe, spec: ModelSpec, layer_spec: str) -> Iterator[str]:
    """Why prediction layers cannot be trained so."""
    if not 0 <= given[PREDICTION] < math.inf:
        yield f"[megatron] {PREDICTION} = {given[PREDICTION]!r}: it takes a finite number of 0 or above"
    if not spec.mtp:
        yield f"[megatron] {PREDICTION}: {spec.name} has no prediction layers to train"
    if recipe.trainer.bridge != "slime":
        yield f"[megatron] {PREDICTION} and trainer.bridge = {recipe.trainer.bridge!r}: keep one of them"
    if layer_spec:
        yield f"[megatron] {PREDICTION} and spec: prediction layers are trained with slime's own layers only"
    if spec.linear is not None and not spec.linear.is_full(spec.layers - 1):
        yield f"[megatron] {PREDICTION}: prediction layers have full attention, the last layer of {spec.name} has not"
    yield from (f"[megatron] {PREDICTION} and {name}: keep one of them" for name in ("fp8", "fp4") if given.get(name))


def _layout_fields(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "num_layers_in_first_pipeline_stage": layout.first_layers or None,
        "num_layers_in_last_pipeline_stage": layout.last_layers or None,
    }


def _transformer(recipe: Recipe, on_gpu: bool) -> dict[str, Any]:
    half = on_gpu and recipe.model.dtype == "bfloat16"
    dtype = "bfloat16" if half else "float32"
    checkpointing = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recipe.trainer.activation_checkpointing
        else {}
    )
    return {"bf16": half, "params_dtype": dtype, "pipeline_dtype": dtype, **checkpointing}


def _optimizer(recipe: Recipe, on_gpu: bool) -> dict[str, Any]:
    section = recipe.trainer
    return {
        "optimizer": "adam",
        "lr": section.lr,
        "weight_decay": section.weight_decay,
        "adam_beta1": section.beta1,
        "adam_beta2": section.beta2,
        "adam_eps": section.adam_eps,
        "clip_grad": section.clip_grad,
        "bf16": on_gpu and recipe.model.dtype == "bfloat16",
        "params_dtype": "bfloat16" if on_gpu and recipe.model.dtype == "bfloat16" else "float32",
    }


def _forced(layout: Layout, on_gpu: bool) -> list[tuple[str, Any, str]]:
    out: list[tuple[str, Any, str]] = [
        ("calculate_per_token_loss", True, "losses carry global denominators: gradients are summed, never averaged"),
        ("hidden_dropout", 0.0, "log-probs of the engine and the trainer must agree"),
        ("attention_dropout", 0.0, "log-probs of the engine and the trainer must agree"),
        ("mtp_num_layers", None, "how many multi-token-prediction layers there are follows from the model"),
    ]
    if layout.vpp > 1:
        out.append(("variable_seq_lengths", False, "micro-batches are padded to one length for interleaved pipelining"))
    elif layout.pp > 1:
        out.append(("variable_seq_lengths", True, "packed micro-batches differ in length"))
    if layout.vpp > 1 and on_gpu:
        reason = "interleaved pipelining sends both ways between two stages at once"
        out += [("overlap_p2p_comm", True, reason), ("batch_p2p_comm", False, reason)]
    if not on_gpu:
        reason = "there is no GPU"
        off = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
        out += [(name, False, reason) for name in (*off, "gradient_accumulation_fusion", "persist_layer_norm")]
        out += [("overlap_p2p_comm", False, reason), ("batch_p2p_comm", False, reason)]
        out.append(("use_cpu_initialization", True, reason))
    return out
