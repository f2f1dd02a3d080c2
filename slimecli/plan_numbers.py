"""What a recipe takes, from the model's numbers alone: tokens, memory per process, disk, arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from slimecli.model_specs import ModelSpec
from slimecli.plan_checks import DataCount
from slimecli.plan_machine import Machine, Speed
from slimecli.plan_spec import teacher_spec
from slimecli.recipe import Recipe

MASTER_BYTES = 4
"""the trainer's weights and gradients are float32"""
ADAM_BYTES = 8
"""two float32 moments per parameter"""
RUNTIME_BYTES = 400 * 10**6
"""Python, torch, transformers and Ray in one process before it holds any model (measured: 330 MB without Ray)"""
SAMPLE_BYTES_PER_TOKEN = 8
"""id, log-prob and mask of a token as compressed JSON: about what the quickstart's files take"""

LIBRARIES = "Python, torch, transformers and Ray themselves"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One planned number with its reason."""

    group: str
    """heading it stands under"""
    name: str
    value: float | int | str
    unit: str
    """steps, tokens, bytes, seconds, ...; empty for words"""
    reason: str
    """how it follows from the recipe and the model"""


def work_values(recipe: Recipe, counts: DataCount) -> list[Value]:
    """Steps, prompts, answers, tokens and passes over the data."""
    rollout, steps = recipe.rollout, recipe.steps
    answers = rollout.batch_size * rollout.n_samples_per_prompt
    per_step = answers * recipe.max_context
    values = []
    if recipe.sft.steps:
        shown = recipe.sft.steps * recipe.sft.batch_size
        passes = f", {shown / counts.sft:.2f} passes over {counts.sft}" if counts.sft else ""
        reason = f"{recipe.sft.steps} steps x {recipe.sft.batch_size}{passes}"
        values.append(Value(group="work", name="SFT demonstrations", value=shown, unit="", reason=reason))
    if not steps:
        return values
    prompts = steps * rollout.batch_size
    passes = f", {prompts / counts.train:.2f} passes over {counts.train} rows" if counts.train else ""
    rows: list[tuple[str, int, str, str]] = [
        ("RL steps", steps, "steps", f"{recipe.trainer.steps_per_rollout} optimizer step(s) each"),
        ("prompts", prompts, "", f"{steps} steps x rollout.batch_size {rollout.batch_size}{passes}"),
        ("answers", steps * answers, "", f"{answers} per step = {rollout.batch_size} x {rollout.n_samples_per_prompt}"),
        ("tokens per step, at most", per_step, "tokens", f"{answers} answers x {recipe.max_context} (prompt + answer)"),
        ("tokens in all, at most", steps * per_step, "tokens", f"{steps} steps"),
    ]
    if rollout.oldest:
        how = "never stops" if rollout.fully_async else f"runs {rollout.max_staleness - recipe.sync.interval + 1} ahead"
        how = how if rollout.overlaps else "and training take turns"
        continued = f"; continued answers {rollout.partial_staleness} more" if rollout.partial else ""
        rows.append(("age of an answer, at most", rollout.oldest, "versions", f"generation {how}{continued}"))
    return values + [Value(group="work", name=n, value=v, unit=u, reason=r) for n, v, u, r in rows]


def trainer_bytes(recipe: Recipe, spec: ModelSpec, on_gpu: bool) -> list[Value]:
    """Memory of one trainer process, by phase."""
    trainer = recipe.trainer
    share, ranks = spec.params / trainer.processes, f"/ {trainer.processes} processes" * (trainer.processes > 1)
    compute = 2 if on_gpu and recipe.model.dtype == "bfloat16" else 4
    tokens = max(trainer.max_tokens_per_micro_batch, recipe.max_context)
    kept = spec.hidden if trainer.activation_checkpointing else spec.activation_width
    activations = tokens * spec.layers * kept * compute
    # a recomputed layer is alive as a whole while its backward pass runs
    activations += tokens * spec.activation_width * compute * trainer.activation_checkpointing
    chunk = min(trainer.logits_chunk_tokens, tokens) * spec.vocab * 4 * 2
    millions = f"{spec.params / 1e6:,.2f} M parameters"
    rows = [
        ("weights", share * MASTER_BYTES, f"{millions} x 4 bytes (float32 master) {ranks}"),
        ("gradients", share * MASTER_BYTES, f"4 bytes per parameter, while learning {ranks}"),
        ("optimizer", share * ADAM_BYTES, f"Adam's two float32 moments {ranks}"),
        (
            "activations, estimated",
            activations,
            f"{tokens} tokens (trainer.max_tokens_per_micro_batch) x {spec.layers} layers"
            + (", recomputed" if trainer.activation_checkpointing else ""),
        ),
        (
            "logits",
            chunk,
            f"{min(trainer.logits_chunk_tokens, tokens)} rows x {spec.vocab} entries, and their gradient",
        ),
    ]
    if recipe.algo.kl_coef > 0:
        rows.insert(1, ("reference model", share * MASTER_BYTES, f"algo.kl_coef {recipe.algo.kl_coef} > 0 {ranks}"))
    teacher = teacher_spec(recipe)
    if teacher is not None:
        size = teacher.params / trainer.processes * MASTER_BYTES
        rows.insert(1, ("teacher", size, f"distill.teacher: {teacher.params / 1e6:,.2f} M parameters {ranks}"))
    if recipe.algo.name == "ppo":
        each = 2 * MASTER_BYTES + ADAM_BYTES
        rows.insert(1, ("critic", share * each, f"weights, gradients, Adam: {each} bytes per parameter {ranks}"))
    waiting = []
    if recipe.algo.old_log_probs == "published":
        size = int(share * MASTER_BYTES)
        waiting = [
            ("published weights", size, f"algo.old_log_probs = 'published': what engines have {ranks}".strip()),
            ("own weights", size, "while the published ones compute in their place"),
        ]
    shown = [(n, int(v), r.strip()) for n, v, r in rows] + ([] if on_gpu else waiting)
    values = with_sum("memory of a trainer process", [*shown, ("libraries", RUNTIME_BYTES, LIBRARIES)])
    return values + (with_sum("host memory of a trainer process", waiting) if on_gpu and waiting else [])


def engine_bytes(recipe: Recipe, spec: ModelSpec, on_gpu: bool) -> list[Value]:
    """Memory of one engine."""
    engine = recipe.engine
    dtype = engine.dtype if engine.dtype != "auto" else (recipe.model.dtype if on_gpu else "float32")
    per_token = spec.kv_bytes_per_token(dtype)
    slots = min(engine.slots, recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt)
    rows = [
        ("weights", spec.weight_bytes(dtype), f"{spec.params / 1e6:,.2f} M parameters in {dtype}"),
        (
            "KV cache, at most",
            slots * (recipe.max_context * per_token + spec.state_bytes(dtype)),
            f"{slots} answers x {recipe.max_context} tokens x {per_token:,} bytes"
            + (f", and a state of {spec.state_bytes(dtype):,} bytes each" if spec.linear else ""),
        ),
    ]
    return with_sum("memory of an engine", [*rows, ("libraries", RUNTIME_BYTES, LIBRARIES)])


def phase_values(
    recipe: Recipe, spec: ModelSpec, trainer: list[Value], engine: list[Value], engines: int
) -> list[Value]:
    """Memory of all processes together, in each phase of a step.

    Args:
        trainer, engine: of one process, as `trainer_bytes` and `engine_bytes` give them.
        engines: how many of them run here; 0 where they run elsewhere, or none is needed.
    """
    ranks = recipe.trainer.processes
    parts = parts_of(trainer)
    held_on = ("weights", "critic", "reference model", "teacher", "published weights", "optimizer", "libraries")
    resting = ranks * sum(parts.get(n, 0) for n in held_on)
    held = total_of(engine) * engines
    processes = f"{ranks} trainer process(es) and {engines} engine(s)"
    rows = [("learn", parts["total"] * ranks + held, f"{processes}: the sums above")]
    if recipe.steps:
        kind, copy = recipe.sync_kind(recipe.cluster.backend), spec.weight_bytes(recipe.model.dtype)
        staged = 0 if kind == "disk" else copy  # disk_delta keeps the version before, to compare with
        rows.insert(0, ("collect", resting + held, f"{processes}, without gradients and activations"))
        rows.append(("publish", resting + held + staged, f"as in collect, and a copy of the weights ({kind})"))
    return [Value(group="memory by phase", name=n, value=v, unit="bytes", reason=r) for n, v, r in rows]


def disk_bytes(recipe: Recipe, spec: ModelSpec, frozen: int = 0) -> list[Value]:
    """Space in the run directory, at most.

    Args:
        frozen: copies of frozen models (bytes).
    """
    keep, published = recipe.checkpoint.keep, spec.weight_bytes(recipe.model.dtype)
    state = spec.params * (MASTER_BYTES + ADAM_BYTES)
    alone = state + published
    one = alone + state * (recipe.algo.name == "ppo")
    with_critic = ", policy and critic" * (recipe.algo.name == "ppo")
    answers = recipe.steps * recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt
    samples = answers * recipe.max_context * SAMPLE_BYTES_PER_TOKEN
    exported = spec.weight_bytes(recipe.export.dtype or recipe.model.dtype)
    rows = [
        (
            "checkpoints",
            one * (keep + 1),
            f"checkpoint.keep {keep} + the one being written, {one:,} bytes each{with_critic}",
        ),
        ("samples, at most", samples, f"{answers:,} answers, about {SAMPLE_BYTES_PER_TOKEN} bytes per token"),
        ("model and export", published + exported, "the starting weights and the exported ones"),
    ]
    kind = recipe.sync_kind(recipe.cluster.backend)
    # the last version and the next; or a whole version, as much in changes, and the whole one that follows
    if recipe.steps and (copies := {"disk": 2, "disk_delta": 3}.get(kind, 0)):
        rows.append(("weights on their way", published * copies, f"sync.kind {kind}, until the end of the run"))
    if frozen:
        rows.append(("frozen models", frozen, "copies of Megatron checkpoints in HF form"))
    if recipe.sft.steps:
        rows.insert(0, ("SFT stage", alone * 2, "its newest checkpoint + the one being written"))
    return with_sum("disk", rows)


def with_sum(group: str, rows: list[tuple[str, int, str]]) -> list[Value]:
    """The rows of a group (name, bytes, reason), and their sum."""
    values = [Value(group=group, name=n, value=v, unit="bytes", reason=r) for n, v, r in rows]
    return [*values, Value(group=group, name="total", value=sum(v for _, v, _ in rows), unit="bytes", reason="")]


def total_of(values: list[Value]) -> int:
    """The sum line of a memory or disk group."""
    return int(next(v.value for v in values if v.name == "total"))


def parts_of(values: list[Value]) -> dict[str, int]:
    """Name -> bytes of a process's own memory; what it has in the host's beside its device is another group."""
    return {v.name: int(v.value) for v in values if v.group == values[0].group}


def placement_values(recipe: Recipe, machine: Machine, sync: str) -> list[Value]:
    """Processes asked for against what is there."""
    trainer, engine = recipe.trainer, recipe.engine
    engines = 0 if engine.urls else engine.replicas
    threads = trainer.processes * trainer.threads + engines * engine.threads
    there = f"{machine.gpus} GPU(s)" if machine.gpus else "no GPU"
    rows: list[tuple[str, int | str, str, str]] = [
        ("trainer", trainer.processes, "processes", f"{trainer.backend}, {trainer.threads} thread(s) each"),
        ("engines", engines or len(engine.urls), "", _engine_reason(recipe)),
        ("machine", f"{machine.cpus} processors, {there}", "", f"the recipe asks for {threads} threads"),
        ("runs on", recipe.cluster.backend, "", recipe.cluster.address or "this machine"),
        ("weight sync", sync, "", "sync.kind" if recipe.sync.kind != "auto" else "auto: the quickest that reaches"),
    ]
    return [Value(group="placement", name=n, value=v, unit=u, reason=r) for n, v, u, r in rows]


def _engine_reason(recipe: Recipe) -> str:
    if recipe.engine.urls:
        return f"already running: {', '.join(recipe.engine.urls)}"
    return f"{recipe.engine.backend}, {recipe.engine.threads} thread(s), {recipe.engine.slots} answers at a time each"


def time_values(recipe: Recipe, spec: ModelSpec, speed: Speed) -> list[Value]:
    """Seconds of arithmetic at the measured rates, one process each; start-up and Python come on top."""
    context = recipe.max_context
    answers = recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt
    forward, backward = spec.flops_per_token(context // 2), spec.flops_per_token(context // 2, backward=True)
    extra = forward * ((recipe.algo.kl_coef > 0) + recipe.algo.recomputes(recipe.trainer.steps_per_rollout))
    extra += (forward + backward) * (recipe.algo.name == "ppo")
    engines = max(len(recipe.engine.urls) or recipe.engine.replicas, 1)
    collect = answers * context * forward / speed.decode / engines
    learn = answers * context * (backward + extra) / speed.train / recipe.trainer.processes
    sft = recipe.sft.steps * recipe.sft.batch_size * context * backward / speed.train / recipe.trainer.processes
    rate = f"{speed.device}: {speed.train / 1e9:,.1f} GFLOP/s in training, {speed.decode / 1e9:,.1f} in decoding"
    rows = [
        ("collect, per step", collect, f"{answers} x {context} tokens at full length; {rate}"),
        ("learn, per step", learn, "forward and backward"),
        ("whole run, arithmetic only", sft + recipe.steps * (collect + learn), f"of which SFT {sft:.0f} s"),
    ]
    return [Value(group="time", name=n, value=round(v, 3), unit="seconds", reason=r) for n, v, r in rows]
