"""The loop's order of verbs and what it promises, with fakes for everything it turns."""

import asyncio
import math

import pytest
import torch

from slimecli.algos import algorithm
from slimecli.errors import DataError, GateError, InterruptedRunError
from slimecli.loop import Parts, loop, prepare
from slimecli.recipe import load_recipe
from slimecli.recipe_algo import AlgoSection
from slimecli.rollout.collect import Collection
from slimecli.rundir import create_run
from slimecli.step_metrics import first_step_check
from slimecli.types import Sample, SampleStatus, StepStats


class FakeTrainer:
    def __init__(self, log, gap=0.0):
        self.log, self.gap, self.batches = log, gap, []

    def log_probs(self, batch, model="policy"):
        self.log.append(f"log_probs {model}")
        return torch.zeros(batch.num_tokens)

    def step(self, batch):
        self.log.append("step")
        self.batches.append(batch)
        metrics = {"logprob_gap": self.gap, "ppo_kl": 0.0, "entropy": 1.0}
        return StepStats(loss=1.0, grad_norm=2.0, lr=3.0, tokens=4, metrics=metrics)


class FakeCollector:
    def __init__(self, log):
        self.log = log

    async def collect(self, step):
        self.log.append(f"collect {step}")
        groups = []
        for g in range(2):
            group = [
                Sample(
                    group_index=2 * step + g,
                    index=i,
                    tokens=[5, 6, 7],
                    response_length=2,
                    rollout_log_probs=[-0.1, -0.2],
                    reward=float(i),
                    status=SampleStatus.COMPLETED,
                )
                for i in range(2)
            ]
            groups.append(group)
        return Collection(groups=groups, metrics={"rollout/reward": 0.5, "rollout/zero_variance_fraction": 0.0})

    async def rest(self):
        self.log.append("rest")

    async def proceed(self, version):
        self.log.append(f"proceed {version}")


@pytest.fixture
def make(runs_root):
    log, committed = [], []

    def build(*overrides, gap=0.0, stop=lambda: False):
        recipe = load_recipe("", overrides)
        return Parts(
            run=create_run("r", recipe),
            recipe=recipe,
            algorithm=algorithm(recipe.algo.name),
            trainer=FakeTrainer(log, gap),
            collector=FakeCollector(log),
            aio=asyncio.Runner(),
            publish=lambda v: log.append(f"publish {v}") or {"weights/fingerprint": f"f{v}"},
            measure=lambda s: log.append(f"measure {s}") or {},
            record=lambda s, c: log.append(f"record {s}"),
            commit=lambda s, m, must: log.append(f"commit {s}{' checkpoint' if must else ''}") or committed.append(m),
            stop_requested=stop,
        )

    return build, log, committed


def test_order_of_verbs(make):
    build, log, committed = make
    loop(build(), 0, 2)
    assert log == [
        *("rest", "publish 0", "measure 0", "commit 0", "proceed 0"),
        *("collect 1", "record 1", "step", "rest", "publish 1", "measure 1", "proceed 1", "commit 1"),
        *("collect 2", "record 2", "step", "rest", "publish 2", "measure 2", "rest", "commit 2 checkpoint"),
    ]
    assert committed[1]["train/first_step_kl"] == 0.0 and "train/first_step_kl" not in committed[2]
    assert committed[2]["weights/fingerprint"] == "f2"


def test_a_resume_publishes_what_it_loaded_before_anything_is_generated(make):
    build, log, _ = make
    loop(build(), 3, 4)
    assert log[:4] == ["rest", "publish 3", "proceed 3", "collect 4"]


def test_weights_are_published_and_measured_at_the_interval_and_at_the_end(make):
    build, log, _ = make
    loop(build("sync.interval=2", "rollout.max_staleness=1"), 0, 5)
    verbs = [x for x in log if x.startswith(("publish", "measure"))]
    assert verbs == [f"{verb} {step}" for step in (0, 2, 4, 5) for verb in ("publish", "measure")]
    assert [x for x in log if x.startswith("proceed")] == ["proceed 0", "proceed 2", "proceed 4"]


def test_a_request_to_stop_waits_for_the_next_publication(make):
    build, log, _ = make
    with pytest.raises(InterruptedRunError, match="step 2 of 5"):
        loop(build("sync.interval=2", "rollout.max_staleness=1", stop=lambda: True), 0, 5)
    assert log[-1] == "commit 2 checkpoint"


def test_old_and_reference_log_probs_only_when_they_are_needed(make):
    build, log, _ = make
    parts = build("trainer.steps_per_rollout=2", "algo.kl_coef=0.1")
    loop(parts, 0, 1)
    assert log.count("log_probs policy") == 1 and log.count("log_probs reference") == 1 and log.count("step") == 2
    assert all(b.old_log_probs is not None and b.ref_log_probs is not None for b in parts.trainer.batches)


def test_a_kl_in_the_reward_needs_log_probs_from_before_the_step(make):
    build, log, _ = make
    parts = build("algo.kl_coef=0.1", "algo.kl_place=reward")
    loop(parts, 0, 1)
    assert log.count("log_probs policy") == 1 and log.count("log_probs reference") == 1 and log.count("step") == 1


def test_a_critic_is_asked_before_the_step_and_learns_returns(make):
    build, log, _ = make
    parts = build("algo.name=ppo", "trainer.steps_per_rollout=2")
    loop(parts, 0, 1)
    assert log.index("log_probs critic") < log.index("step")
    for batch in parts.trainer.batches:
        trained = batch.loss_mask > 0
        assert torch.equal(batch.returns[trained], batch.advantages[trained]), "values are 0, lambda is 1"
        assert batch.returns.max() == 1 and batch.values.abs().max() == 0


def test_the_engine_can_speak_for_the_old_policy(make):
    build, log, committed = make
    parts = build("algo.old_log_probs=engine", "trainer.steps_per_rollout=2")
    loop(parts, 0, 1)
    assert "log_probs policy" not in log
    for batch in parts.trainer.batches:
        assert torch.equal(batch.old_log_probs, batch.rollout_log_probs) and batch.old_log_probs.min() < 0
    assert committed[1]["train/first_step_kl"] == 0.0


def test_the_published_weights_can_be_the_old_policy(make):
    build, log, _ = make
    parts = build("algo.old_log_probs=published", "sync.interval=2", "rollout.max_staleness=1")
    loop(parts, 0, 2)
    assert [x for x in log if x.startswith("log_probs")] == ["log_probs old_policy"] * 2
    assert all(b.old_log_probs is not None for b in parts.trainer.batches)


@pytest.mark.parametrize("where", ["url='http://teacher:1'", "teacher='/teacher'"])
def test_a_teacher_is_held_against_the_policy_before_the_step(make, where):
    build, log, _ = make
    parts = build(f"distill.{where}", "distill.only=true", "distill.coef=0.5")
    collect = parts.collector.collect

    async def judged(step):
        collection = await collect(step)
        for sample in (s for g in collection.groups for s in g) if "url" in where else ():
            sample.teacher_log_probs = [-1.0, -3.0]
        return collection

    parts.collector.collect = judged
    loop(parts, 0, 1)
    (batch,) = parts.trainer.batches
    asked = ["log_probs policy"] if "url" in where else ["log_probs policy", "log_probs teacher"]
    assert [x for x in log if x.startswith("log_probs")] == asked
    gap = [-0.5, -1.5] if "url" in where else [0.0, 0.0]  # the fake trainer says 0 of everything
    assert batch.advantages[batch.loss_mask > 0].tolist() == gap * 4


def test_the_first_step_is_not_held_to_an_engine_that_speaks_for_the_old_policy():
    first = StepStats(loss=0, grad_norm=0, lr=0, tokens=1, metrics={"ppo_kl": 1e-3, "kl": 2e-9})
    assert first_step_check(first, AlgoSection()) == {"train/first_step_kl": 1e-3}
    assert first_step_check(first, AlgoSection(old_log_probs="engine")) == {"train/first_step_kl": 2e-9}


def test_normalised_corrections_take_the_log_probs_and_the_scale_of_their_own_step(make):
    """The trainer says 0, the engine -0.1 and -0.2 of the two tokens of every answer: weights exp(0.1), exp(0.2)."""
    build, log, _ = make
    scale = 2 / (math.exp(0.1) + math.exp(0.2))
    parts = build("algo.correction.level=token", "algo.correction.normalize=true", "algo.std_normalization=false")
    (batch,) = prepare(parts, asyncio.run(FakeCollector([]).collect(1)).groups)
    assert log == ["log_probs policy"]
    assert batch.advantages[batch.loss_mask > 0].abs().tolist() == pytest.approx([0.5 * scale] * 8)


def test_the_proximal_policy_is_the_trainers_before_the_first_of_several_steps(make):
    """The decoupled objective: old weights spoke (-0.1, -0.2); the ratio is to the policy at the start of the step."""
    build, log, _ = make
    parts = build("trainer.steps_per_rollout=2", "algo.correction.level=token", "algo.correction.high=0")
    loop(parts, 0, 1)
    assert log.index("log_probs policy") < log.index("step") and log.count("log_probs policy") == 1
    for batch in parts.trainer.batches:
        trained = batch.loss_mask > 0
        assert batch.old_log_probs.abs().max() == 0
        assert batch.rollout_log_probs[trained].tolist() == pytest.approx([-0.1, -0.2] * 2)


def test_an_engine_without_log_probs_cannot_speak_for_the_old_policy(make):
    build, _, _ = make
    parts = build("algo.old_log_probs=engine")
    groups = asyncio.run(FakeCollector([]).collect(1)).groups
    for sample in (s for group in groups for s in group):
        sample.rollout_log_probs = None
    with pytest.raises(DataError, match="no rollout_log_probs"):
        prepare(parts, groups)


def test_mini_batches_hold_whole_groups_and_all_samples_once(make):
    build, _, _ = make
    parts = build("trainer.steps_per_rollout=2")
    loop(parts, 0, 1)
    assert [b.group_ids.tolist() for b in parts.trainer.batches] == [[2, 2], [3, 3]]
    for batch in parts.trainer.batches:
        assert batch.loss_weight.sum() == pytest.approx(1.0)


def test_a_request_to_stop_makes_a_checkpoint_first(make):
    build, log, _ = make
    with pytest.raises(InterruptedRunError, match="step 1 of 5"):
        loop(build(stop=lambda: True), 0, 5)
    assert log[-1] == "commit 1 checkpoint"


def test_a_broken_gate_stops_with_a_checkpoint_of_the_step(make):
    build, log, _ = make
    parts = build(gap=0.5)
    with pytest.raises(GateError, match="0.5"):
        loop(parts, 0, 5)
    assert log[-1] == "commit 1 checkpoint" and parts.run.read_records(parts.run.verdicts_path)[0]["step"] == 1


def test_a_gate_may_only_warn(make):
    build, log, _ = make
    parts = build("gates.action='warn'", gap=0.5)
    loop(parts, 0, 2)
    assert len(parts.run.read_records(parts.run.verdicts_path)) == 2 and log[-1] == "commit 2 checkpoint"
