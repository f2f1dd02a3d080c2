"""THE loop: collect -> learn -> publish -> measure, once per step. The four verbs are implemented here alone.

Step k collects answers with the weights of step k-1 (where the collector runs ahead, of a stated older one), learns
from them, and publishes the weights of step k. SFT is the same loop over demonstrations, without an engine to publish
to. Where things run is the business of the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from slimecli.algos import Algorithm
from slimecli.algos.correction import normalised
from slimecli.algos.distillation import distilled
from slimecli.batch import TrainBatch, from_groups, split_steps, weigh
from slimecli.clock import Clock
from slimecli.cluster.turns import Phase, nobody_waits
from slimecli.errors import DataError, GateError, InterruptedRunError
from slimecli.observe.gates import check_gates
from slimecli.protocols import Trainer
from slimecli.recipe import Recipe
from slimecli.rollout.collect import Collection
from slimecli.rollout.executions import seconds_outside
from slimecli.rollout.loop_thread import Runner
from slimecli.rundir import RunDir
from slimecli.step_metrics import first_step_check, teacher_metrics, train_metrics
from slimecli.types import Group


class Collector(Protocol):
    """The one place that knows where samples come from and what may overlap with what."""

    async def collect(self, step: int) -> Collection:
        """The samples that `step` trains on."""

    async def rest(self) -> None:
        """Wait until the engines may change their weights."""

    async def proceed(self, version: int) -> None:
        """The engines hold these weights, and may be used until the next `rest`."""

    def cursor(self) -> dict[str, Any]:
        """What is needed, besides the samples on disk, to go on after the step that was collected last."""


@dataclass(kw_only=True)
class Parts:
    """What the loop turns. A part left out (None) makes its verb a no-op."""

    run: RunDir
    recipe: Recipe
    algorithm: Algorithm
    trainer: Trainer
    collector: Collector
    aio: Runner
    publish: Callable[[int], dict[str, Any]] | None
    """version -> {"weights/fingerprint": ...}; raises unless every engine holds these weights"""
    measure: Callable[[int], dict[str, float]] | None
    """step -> held-out scores, {} where none are due"""
    record: Callable[[int, Collection], None]
    """begin to commit what was collected; `commit` ends it"""
    commit: Callable[[int, dict[str, Any], bool], None]
    """(step, metrics, must make a checkpoint): commit what was learnt"""
    turn: Callable[[Phase], None] = nobody_waits
    """make it this phase's turn on devices that trainer and engines share"""
    clock: Clock = field(default_factory=Clock)
    stop_requested: Callable[[], bool] = lambda: False


def loop(parts: Parts, start: int, stop: int) -> None:
    """Run steps start+1..stop; `start` is the step whose weights the trainer holds."""
    publish(parts, start)
    if start == 0:
        parts.commit(0, measure(parts, 0), False)
    proceed(parts, start)
    for step in range(start + 1, stop + 1):
        collection = collect(parts, step)
        metrics = collection.metrics | learn(parts, step, collection)
        is_published = step == stop or step % parts.recipe.sync.interval == 0
        if is_published:
            metrics |= publish(parts, step)
            metrics |= measure(parts, step)
        interrupted, verdict = is_published and parts.stop_requested(), judge(parts, step, metrics)
        is_last = interrupted or verdict is not None or step == stop
        if is_last:
            rest(parts)
        elif is_published:
            proceed(parts, step)
        parts.commit(step, metrics, is_last)
        if verdict is not None:
            raise verdict
        if interrupted and step < stop:
            raise InterruptedRunError(f"stopped after step {step} of {stop}; nothing is lost")


def collect(parts: Parts, step: int) -> Collection:
    """Samples for this step."""
    parts.turn("generate")
    with parts.clock.phase("collect"):
        collection = parts.aio.run(parts.collector.collect(step))
    parts.clock.add("generate", collection.seconds)
    for name, seconds in seconds_outside([s for group in collection.groups for s in group]).items():
        parts.clock.add(name, seconds)
    return collection


def rest(parts: Parts) -> None:
    """Bring generation that runs ahead to a point where weights may change and a checkpoint can be made."""
    with parts.clock.phase("rest"):
        parts.aio.run(parts.collector.rest())


def proceed(parts: Parts, version: int) -> None:
    """Let generation run ahead with the weights that the engines hold."""
    parts.aio.run(parts.collector.proceed(version))


def learn(parts: Parts, step: int, collection: Collection) -> dict[str, Any]:
    """One optimizer step per mini-batch; meanwhile the samples are being written to the run directory."""
    parts.turn("learn")
    with parts.clock.phase("learn"):
        try:
            minis = prepare(parts, collection.groups)
        finally:
            parts.record(step, collection)
        stats = [parts.trainer.step(mini) for mini in minis]
        parts.clock.tokens(sum(mini.num_tokens for mini in minis))
    metrics = train_metrics(stats) | (first_step_check(stats[0], parts.recipe.algo) if step == 1 else {})
    return metrics | (teacher_metrics(minis) if parts.recipe.distill.is_on else {})


def prepare(parts: Parts, groups: list[Group]) -> list[TrainBatch]:
    """Mini-batches with all that the loss needs: log-probs as asked for, advantages, weights."""
    recipe, trainer = parts.recipe, parts.trainer
    batch = from_groups(groups, temperature=recipe.rollout.temperature, reward_key=recipe.reward.key)
    if recipe.algo.old_log_probs == "engine" and parts.algorithm.needs_rollout:
        batch = batch.replace(old_log_probs=engine_log_probs(batch))
    elif recipe.algo.old_log_probs == "published" and parts.algorithm.needs_rollout:
        batch = batch.replace(old_log_probs=trainer.log_probs(batch, model="old_policy"))
    elif recipe.distill.is_on or recipe.algo.recomputes(recipe.trainer.steps_per_rollout):
        batch = batch.replace(old_log_probs=trainer.log_probs(batch))
    if recipe.algo.kl_coef > 0 and parts.algorithm.needs_rollout:
        batch = batch.replace(ref_log_probs=trainer.log_probs(batch, model="reference"))
    if recipe.distill.teacher:
        batch = batch.replace(teacher_log_probs=trainer.log_probs(batch, model="teacher"))
    if parts.algorithm.returns is not None:
        batch = batch.replace(values=trainer.log_probs(batch, model="critic"))
        batch = batch.replace(returns=parts.algorithm.returns(batch, recipe.algo))
    batch = batch.replace(advantages=parts.algorithm.advantages(batch, recipe.algo))
    if recipe.distill.is_on:
        batch = distilled(batch, recipe.distill)
    length = recipe.algo.constant_length or recipe.rollout.max_response_tokens
    minis = split_steps(batch, recipe.trainer.steps_per_rollout)
    return [normalised(weigh(mini, recipe.algo.aggregation, length), recipe.algo) for mini in minis]


def engine_log_probs(batch: TrainBatch) -> Tensor:
    """[T] what the engine said of each trained token."""
    if batch.rollout_log_probs is None:
        raise DataError(
            "algo.old_log_probs = 'engine', but the samples carry no rollout_log_probs",
            "let the generate function return them, or set algo.old_log_probs to recompute",
        )
    return batch.rollout_log_probs


def publish(parts: Parts, version: int) -> dict[str, Any]:
    """Give the new weights to every engine, and see that they arrived."""
    if parts.publish is None:
        return {}
    rest(parts)
    parts.turn("share")
    with parts.clock.phase("publish"):
        return parts.publish(version)


def measure(parts: Parts, step: int) -> dict[str, float]:
    """Held-out scores of the weights of this step."""
    if parts.measure is None:
        return {}
    parts.turn("generate")
    with parts.clock.phase("measure"):
        return parts.measure(step)


def judge(parts: Parts, step: int, metrics: dict[str, Any]) -> GateError | None:
    """Hold the step against the recipe's gates; verdicts are stored, and the error to stop with is returned."""
    if not parts.algorithm.needs_rollout:
        return None
    verdicts = check_gates(parts.recipe.gates, step, metrics)
    for verdict in verdicts:
        parts.run.append(parts.run.verdicts_path, {"step": step, **verdict.to_dict()})
    if verdicts and parts.recipe.gates.action == "stop":
        return GateError("; ".join(v.what for v in verdicts), verdicts[0].fix)
    return None
