"""Recipe + model -> everything megatron-core is configured with, each forced value with its reason.

Names in `[megatron]` are Megatron-LM's flags, with dashes or underscores. They are checked against the fields that the
installed megatron-core has, read from its source: neither torch nor Megatron is imported, so `slime plan` can do it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import UsageError, nearest
from slimecli.model_specs import ModelSpec
from slimecli.recipe import Recipe
from slimecli.trainers.megatron.layout import Layout, problems

_LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "sequence_parallel": "sp",
    "decoder_first_pipeline_num_layers": "first_layers",
    "decoder_last_pipeline_num_layers": "last_layers",
    "num_layers_in_first_pipeline_stage": "first_layers",
    "num_layers_in_last_pipeline_stage": "last_layers",
}
"""flag -> Layout field"""
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
}
"""flag -> where the recipe says it"""
_SOURCES = {
    "transformer": (
        ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ("model_parallel_config.py", ("ModelParallelConfig",)),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),),
    "optimizer": (("optimizer/optimizer_config.py", ("OptimizerConfig",)),),
}
"""which dataclasses of megatron-core the arguments go to"""
_ALIASES = {"num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size"}


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


def settings_of(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> Settings:
    """All errors of `[megatron]` at once, or the settings.

    Raises UsageError: an unknown name with the nearest, a value that belongs to the recipe or the model, a layout that
    the model cannot be divided into.
    """
    given = {_ALIASES.get(k, k): v for k, v in ((k.replace("-", "_"), v) for k, v in recipe.megatron.items())}
    layer_spec = str(given.pop("spec", ""))
    errors = _name_errors(given, spec)
    if not errors:
        layout = _layout(given, recipe.trainer.processes)
        errors = problems(spec, layout)
    if errors:
        raise UsageError("; ".join(errors), "`docs/megatron.md` lists what [megatron] takes")
    forced = _forced(layout, spec, on_gpu)
    fields = _fields()
    parts: dict[str, dict[str, Any]] = {"transformer": _transformer(recipe, on_gpu), "ddp": {}, "optimizer": {}}
    parts["ddp"] |= {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    parts["optimizer"] |= {**_optimizer(recipe, on_gpu), "use_distributed_optimizer": True}
    for name, value in given.items():
        if name not in _LAYOUT:
            for part, known in fields.items():
                if name in known:
                    parts[part][name] = value
    for name, value, reason in forced:
        if name in given and given[name] != value:
            raise UsageError(f"[megatron] {name} = {given[name]!r}: {reason}", f"leave it out, slime sets {value!r}")
        for part, known in fields.items():
            if name in known:
                parts[part][name] = value
    parts["transformer"] |= _layout_fields(layout)
    return Settings(layout=layout, layer_spec=layer_spec, forced=tuple(forced), **parts)


def _name_errors(given: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    model = {k.replace("-", "_") for k in spec.megatron_args()}
    known = set(_LAYOUT) | set(_ALIASES) | {n for names in _fields().values() for n in names}
    out = []
    for name in given:
        if name in _RECIPE:
            out.append(f"[megatron] {name}: the recipe says that in {_RECIPE[name]}")
        elif name in model and not name.startswith("moe_"):
            out.append(f"[megatron] {name}: it follows from the model ({spec.name})")
        elif name not in known:
            out.append(f"[megatron] {name} is no argument of the installed megatron-core{nearest(name, sorted(known))}")
    return out


def _layout(given: Mapping[str, Any], world: int) -> Layout:
    sizes = {_LAYOUT[k]: v for k, v in given.items() if k in _LAYOUT and v is not None}
    sizes.setdefault("etp", sizes.get("tp", 1))
    return Layout(world=world, **sizes)


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


def _forced(layout: Layout, spec: ModelSpec, on_gpu: bool) -> list[tuple[str, Any, str]]:
    out: list[tuple[str, Any, str]] = [
        ("calculate_per_token_loss", True, "losses carry global denominators: gradients are summed, never averaged"),
        ("hidden_dropout", 0.0, "log-probs of the engine and the trainer must agree"),
        ("attention_dropout", 0.0, "log-probs of the engine and the trainer must agree"),
        ("mtp_num_layers", None, "multi-token-prediction layers are kept as they are and not trained"),
    ]
    if layout.vpp > 1:
        out.append(("variable_seq_lengths", False, "micro-batches are padded to one length for interleaved pipelining"))
    elif layout.pp > 1:
        out.append(("variable_seq_lengths", True, "packed micro-batches differ in length"))
    if spec.moe is not None or layout.pp > 1:
        out.append(("moe_token_dispatcher_type", "alltoall", "micro-batches differ in length"))
    if not on_gpu:
        reason = "there is no GPU"
        off = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
        out += [(name, False, reason) for name in (*off, "gradient_accumulation_fusion", "persist_layer_norm")]
        out += [("overlap_p2p_comm", False, reason), ("batch_p2p_comm", False, reason)]
        out.append(("use_cpu_initialization", True, reason))
    return out


@cache
def _fields() -> dict[str, frozenset[str]]:
    """Part of Settings -> names of the dataclass fields that the installed megatron-core has for it."""
    root = megatron_folder()
    out: dict[str, frozenset[str]] = {}
    for part, sources in _SOURCES.items():
        names: set[str] = set()
        for file, classes in sources:
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    names |= {
                        n.target.id
                        for n in node.body
                        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                    }
        out[part] = frozenset(names)
    return out


def megatron_folder() -> Path:
    """Where the installed megatron-core lies."""
    found = importlib.util.find_spec("megatron")
    for place in found.submodule_search_locations or () if found else ():
        if (Path(place) / "core" / "model_parallel_config.py").is_file():
            return Path(place) / "core"
    raise UsageError("megatron-core is not installed", 'pip install "slimecli[megatron]"')
