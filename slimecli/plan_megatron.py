"""What `slime plan` says of a Megatron trainer: what it decides, and the memory of its fullest process."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

from slimecli.model_specs import ModelSpec
from slimecli.plan_numbers import ADAM_BYTES, LIBRARIES, MASTER_BYTES, RUNTIME_BYTES, Value, with_sum
from slimecli.plan_spec import teacher_spec
from slimecli.recipe import Recipe
from slimecli.trainers.megatron.arguments import DEFAULTS, Settings, settings_of
from slimecli.trainers.megatron.layout import Layout, fits
from slimecli.trainers.megatron.shares import (
    Parameters,
    critic_parameters,
    padded_vocab,
    prediction_parameters,
    prediction_width,
    stage_layers,
    stage_parameters,
    token_width,
)

LOGITS_COPIES = 4
"""float32 arrays of [rows, vocabulary share] alive at once in the backward pass of log-probs"""


def decided_values(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> list[Value]:
    """The layout, and what the backend sets whatever the recipe leaves open, with reasons."""
    settings = settings_of(recipe, spec, on_gpu=on_gpu)
    layout = settings.layout
    world = f"{layout.world} process(es) = {layout.describe()}"
    out = [Value(group="megatron", name="layout", value=layout.describe(), unit="", reason=world)]
    merged: dict[tuple[str, str], list[str]] = {}
    for name, value, reason in settings.forced:
        merged.setdefault((_said(value), f"always: {reason}"), []).append(name)
    for name, value, reason in DEFAULTS:
        if _stands(settings, name, value):
            merged.setdefault((_said(value), f"unless [megatron] says otherwise: {reason}"), []).append(name)
    return out + [
        Value(group="megatron", name=", ".join(names), value=value, unit="", reason=reason)
        for (value, reason), names in merged.items()
    ]


def _said(value: Any) -> str:
    """As a recipe writes it."""
    return "none" if value is None else json.dumps(value)


def _stands(settings: Settings, name: str, value: Any) -> bool:
    return any(part.get(name) == value for part in (settings.transformer, settings.ddp, settings.optimizer))


def megatron_bytes(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> list[Value]:
    """Memory of the fullest trainer process: weights, gradients, optimizer, activations, logits; and on a GPU, of the
    host's memory, the models that wait there. Where policy and critic take turns, the policy's is the fuller one: it
    has the logits."""
    settings = settings_of(recipe, spec, on_gpu=on_gpu)
    stages = [_stage_rows(recipe, spec, settings, stage, on_gpu) for stage in range(settings.layout.pp)]
    rows = max(stages, key=lambda r: sum(v for _, v, _ in r))
    stage = stages.index(rows)
    where = f", stage {stage + 1} of {settings.layout.pp}" if settings.layout.pp > 1 else ""
    rows = [(name, value, reason + where * (name == "weights")) for name, value, reason in rows]
    waiting = []
    if settings.optimizer.get("optimizer_cpu_offload"):
        part = settings.optimizer.get("optimizer_offload_fraction", 0.0)
        rows = [(n, int(v * (1 - part)) if n == "optimizer" else v, said) for n, v, said in rows]
        size = int(part * sum(model[-1] for model in _in_training(recipe, spec, settings, stage).values()))
        waiting = [("optimizer", size, f"optimizer_cpu_offload: {part:.0%} of its state")]
    if on_gpu:
        waiting += _taking_turns(recipe, spec, settings, stage)
        rows += _visiting(recipe, spec, settings, stage)
    waiting += _beside(recipe, spec, settings, stage)
    if not on_gpu:
        rows[1:1] = waiting
        waiting = []
    values = with_sum("memory of a trainer process", [*rows, ("libraries", RUNTIME_BYTES, LIBRARIES)])
    return values + (with_sum("host memory of a trainer process", waiting) if waiting else [])


def _in_training(recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int) -> dict[str, tuple[int, int, int]]:
    """Policy and, with PPO, critic -> bytes of weights, gradients, optimizer."""
    shares = {"policy": _share(spec, settings, stage)}
    if recipe.algo.name == "ppo":
        shares["critic"] = critic_parameters(spec, settings.layout, stage)
    compute = _compute_bytes(settings)
    gradient = MASTER_BYTES if settings.ddp["grad_reduce_in_fp32"] else compute
    counts = {name: share.dense + share.expert for name, share in shares.items()}
    return {
        name: (counts[name] * compute, counts[name] * gradient, _optimizer_bytes(settings, share)[0])
        for name, share in shares.items()
    }


def _share(spec: ModelSpec, settings: Settings, stage: int) -> Parameters:
    """Of the policy, with the prediction layers that are trained."""
    share = stage_parameters(spec, settings.layout, stage)
    return share + prediction_parameters(spec, settings.layout) if _predicts(settings, stage) else share


def _predicts(settings: Settings, stage: int) -> bool:
    return settings.prediction > 0 and stage == settings.layout.pp - 1


def _taking_turns(recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int) -> list[tuple[str, int, str]]:
    """What policy and critic take in host memory where only one is on the device: both, while they change places."""
    models = _in_training(recipe, spec, settings, stage)
    if not recipe.algo.critic_offload or "critic" not in models:
        return []
    offloads = settings.optimizer.get("optimizer_cpu_offload")
    part = settings.optimizer.get("optimizer_offload_fraction", 0.0) if offloads else 0.0
    said = "algo.critic_offload: weights, gradients, optimizer, while the {} computes"
    return [
        (name, weights + gradients + int(optimizer * (1 - part)), said.format(other))
        for (name, (weights, gradients, optimizer)), other in zip(models.items(), ("critic", "policy"), strict=True)
    ]


def _beside(recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int) -> list[tuple[str, int, str]]:
    """Frozen models, which wait in host memory, and the policy's weights while one of them takes their place."""

    found, own = [], _weight_bytes(spec, settings, stage)
    if recipe.algo.kl_coef > 0:
        said = f"algo.kl_coef {recipe.algo.kl_coef} > 0: its weights wait in host memory"
        found.append(("reference model", own, said))
    if recipe.algo.old_log_probs == "published":
        found.append(("published weights", own, "algo.old_log_probs = 'published': what engines have"))
    teacher = teacher_spec(recipe)
    swapped = bool(found) or (teacher is not None and fits(teacher, spec))
    if teacher is not None:
        size = _weight_bytes(teacher, settings, stage)
        found.append(("teacher", size, "distill.teacher: its weights wait in host memory"))
    if swapped:
        found.append(("own weights", own, "while one of these computes in their place"))
    return found


def _visiting(recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int) -> list[tuple[str, int, str]]:
    """A frozen model that has no place on the device to take, and comes there beside the policy."""
    teacher = teacher_spec(recipe)
    if teacher is None or fits(teacher, spec):
        return []
    said = "distill.teacher is of another architecture: its weights are there while it computes"
    return [("teacher at work", _weight_bytes(teacher, settings, stage), said)]


def _weight_bytes(spec: ModelSpec, settings: Settings, stage: int) -> int:
    """Of a frozen model."""
    share = stage_parameters(spec, settings.layout, stage)
    return (share.dense + share.expert) * _compute_bytes(settings)


def _stage_rows(
    recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int, on_gpu: bool
) -> list[tuple[str, int, str]]:
    layout, trainer = settings.layout, recipe.trainer
    share = _share(spec, settings, stage)
    count, compute = share.dense + share.expert, _compute_bytes(settings)
    experts = f", of which experts {share.expert / 1e6:,.2f} M" if share.expert else ""
    experts += ", prediction layers included," if _predicts(settings, stage) else ""
    dtype = "float32" if compute == MASTER_BYTES else "bfloat16"
    models, how = _in_training(recipe, spec, settings, stage), _optimizer_bytes(settings, share)[1]
    weights, gradients, optimizer = models["policy"]
    rows = [
        ("weights", weights, f"{count / 1e6:,.2f} M parameters{experts} in {dtype}"),
        ("gradients", gradients, f"{gradients // count} bytes per parameter, added up"),
    ]
    if "critic" in models and not (recipe.algo.critic_offload and on_gpu):
        held = models["critic"]
        said = f"weights and gradients of {held[0] / compute / 1e6:,.2f} M parameters; its optimizer is counted below"
        rows.append(("critic", held[0] + held[1], said))
        optimizer, how = optimizer + held[2], f"{how}, of policy and critic"
    if _predicts(settings, stage) and layout.pp > 1 and not spec.tied:
        table = padded_vocab(spec, layout.tp) // layout.tp * spec.hidden
        rows.append(("embedding", table * compute, "the first stage's, for the prediction layers"))
    rows += [
        ("optimizer", optimizer, how),
        ("activations, estimated", *_activations(recipe, spec, settings, stage, on_gpu)),
    ]
    if stage == layout.pp - 1:
        vocab = padded_vocab(spec, layout.tp) // layout.tp
        chunk = min(trainer.logits_chunk_tokens, _tokens(recipe, layout))
        logits = (chunk * LOGITS_COPIES + spec.hidden) * vocab * 4
        rows.append(
            (
                "logits",
                logits,
                f"{chunk} rows x {vocab} entries, {LOGITS_COPIES} times, and the output layer's gradient",
            )
        )
    return rows


def _optimizer_bytes(settings: Settings, share: Parameters) -> tuple[int, str]:
    """(size on one process, of what)."""
    layout = settings.layout
    state = ADAM_BYTES + (MASTER_BYTES if _compute_bytes(settings) < MASTER_BYTES else 0)
    replicas = layout.dp * layout.cp
    expert_replicas = max(layout.world // (layout.pp * layout.ep * layout.etp), 1)
    if not settings.ddp["use_distributed_optimizer"]:
        replicas = expert_replicas = 1
    divided = f", divided over {replicas} data-parallel processes" if replicas > 1 else ""
    size = math.ceil(state * (share.dense / replicas + share.expert / expert_replicas))
    return size, f"Adam's two float32 moments{' and float32 weights' * (state > ADAM_BYTES)}{divided}"


def _activations(recipe: Recipe, spec: ModelSpec, settings: Settings, stage: int, on_gpu: bool) -> tuple[int, str]:
    layout, tokens = settings.layout, _tokens(recipe, settings.layout)
    fused = on_gpu and importlib.util.find_spec("transformer_engine") is not None
    granularity = settings.transformer.get("recompute_granularity")
    modules = settings.transformer.get("recompute_modules") or () if granularity == "selective" else ()
    layers = stage_layers(spec, layout)[stage]
    widths = [token_width(spec, layout, i, recomputed=modules, fused=fused) for i in layers]
    if _predicts(settings, stage):
        widths.append(prediction_width(spec, layout, recomputed=modules, fused=fused))
    per_batch, how = sum(widths), ", selectively recomputed" * (granularity == "selective")
    in_flight = min(_in_flight(layout, stage), _micro_batches(recipe, layout))
    total = per_batch * in_flight
    if granularity == "full":
        # what goes into a layer is kept; the layers of one step of recomputation are whole while it runs
        every = settings.transformer["recompute_num_layers"]
        kept = spec.hidden / (layout.tp if layout.sp else 1) * len(widths)
        once = max(sum(widths[i : i + every]) for i in range(0, max(len(widths), 1), every))
        block = settings.transformer["recompute_method"] == "block"
        if block:
            kept, once = kept + sum(widths[every:]), max(widths, default=0)
        total, how = (kept if block else kept / every) * in_flight + once, ", recomputed"
    said = f"{tokens} tokens x {len(layers)} layers{how}"
    if layout.pp > 1:
        said += f", {in_flight} micro-batch(es) in flight"
    return int(total * tokens * _compute_bytes(settings)), said


def _tokens(recipe: Recipe, layout: Layout) -> int:
    """Tokens of a micro-batch on one process; a sample over the budget makes one of its own."""
    return max(recipe.trainer.max_tokens_per_micro_batch, -(-recipe.max_context // layout.cp))


def _micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Micro-batches of one step on one data-parallel rank, at most."""
    answers = max(recipe.trainer.global_batch_size, recipe.sft.batch_size if recipe.sft.steps else 0)
    return max(1, math.ceil(answers * recipe.max_context / (_tokens(recipe, layout) * layout.cp * layout.dp)))


def _in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches whose activations a stage holds in the one-forward-one-backward schedule; the first holds most."""
    if layout.vpp > 1:
        return math.ceil(layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp)))
    return layout.pp - stage


def _compute_bytes(settings: Settings) -> int:
    return 2 if settings.transformer["params_dtype"] == "bfloat16" else MASTER_BYTES
