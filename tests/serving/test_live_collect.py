"""Conversations become the batch of a step: feedback counts, labels are scored, failures are counted."""

import asyncio

import pytest

from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rollout.generate import Generator
from slimecli.rundir import RunDir
from slimecli.serving.live_collect import LiveCollector, NoEngine, live_source
from slimecli.serving.store import recording
from slimecli.types import SampleStatus
from tests.serving.test_store import record

SETS = (
    "data.train='live:'",
    "rollout.batch_size=1",
    "rollout.n_samples_per_prompt=2",
    "live.wait_s=0.3",
)


async def length(args, sample, **kwargs):
    if sample.label == "broken":
        raise SlimeError("the scorer is broken")
    return float(len(sample.label or ""))


def collector(tmp_path, *sets):
    recipe = load_recipe(overrides=(*SETS, *sets))
    generator = Generator(engine=NoEngine(), reward=length, args=None, timeout_s=5)
    return LiveCollector(recipe, live_source(recipe, RunDir(tmp_path)), generator)


def labelled(tmp_path, number, label, store, reward=None):
    """A conversation that ends with a label."""
    (session,) = record(tmp_path, number, store=store, reward=None)
    session.base.label = label
    samples = session.samples(lambda ids: "")
    for sample in samples:
        sample.reward = reward
    store.end(session, samples, "feedback")


def test_feedback_counts_as_it_is_and_labels_are_scored(tmp_path):
    with recording(RunDir(tmp_path).live_dir) as store:
        labelled(tmp_path, 0, "four", store)
        labelled(tmp_path, 1, "four", store, reward=9.0)
    batch = asyncio.run(collector(tmp_path).collect(1))
    ((first, second),) = batch.groups
    assert (first.reward, second.reward) == (4.0, 9.0) and batch.metrics["rollout/reward"] == 6.5
    assert batch.metrics["rollout/sessions"] == 2 and batch.metrics["rollout/staleness_max"] == 0


def test_what_has_no_feedback_is_scored_only_if_the_recipe_says_so(tmp_path):
    with recording(RunDir(tmp_path).live_dir) as store:
        for number in range(2):
            labelled(tmp_path, number, None, store)
    with pytest.raises(SlimeError, match="2 left out: unrated"):
        asyncio.run(collector(tmp_path).collect(1))
    batch = asyncio.run(collector(tmp_path, "live.unscored=true").collect(1))
    assert [s.reward for s in batch.groups[0]] == [0.0, 0.0]


def test_a_score_that_fails_is_counted_and_a_group_without_any_is_passed_over(tmp_path):
    with recording(RunDir(tmp_path).live_dir) as store:
        for number, label in enumerate(("broken", "broken", "broken", "ok")):
            labelled(tmp_path, number, label, store)
    batch = asyncio.run(collector(tmp_path, "rollout.max_failed_fraction=1").collect(1))
    assert [s.status for s in batch.groups[0]] == [SampleStatus.FAILED, SampleStatus.COMPLETED]
    assert batch.metrics["rollout/reward_failed"] == 3.0 and batch.groups[0][1].reward == 2.0


def test_a_broken_scorer_ends_the_run_and_does_not_use_up_what_people_said(tmp_path):
    with recording(RunDir(tmp_path).live_dir) as store:
        for number in range(6):
            labelled(tmp_path, number, "broken", store)
    broken = collector(tmp_path)
    with pytest.raises(
        SlimeError, match=r"2 of 2 answers failed \(allowed: 10%\); the first: reward: the scorer is bro"
    ):
        asyncio.run(broken.collect(1))
    broken._source.poll()
    assert broken._source.available == 2, "the next ones were left alone"


def test_nothing_is_generated_where_there_is_no_engine():
    with pytest.raises(SlimeError, match="has no engine of its own"):
        asyncio.run(NoEngine().generate({}))
