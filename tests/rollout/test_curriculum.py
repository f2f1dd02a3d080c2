"""Adaptive difficulty: the levels follow the policy, exactly repeatable and resumable."""

import asyncio
import dataclasses
import json
import random
from collections import Counter

import pytest

from slimecli.data_tools.filters import load_filter
from slimecli.data_tools.formats import read_rows
from slimecli.data_tools.prepare import prepare
from slimecli.errors import DataError, UsageError
from slimecli.plan_checks import check_data
from slimecli.recipe import validate_recipe
from slimecli.recipe_sections import CurriculumSection, DataSection, SftSection
from slimecli.rollout.collect import RolloutCollector
from slimecli.rollout.curriculum import CurriculumSource
from slimecli.types import Sample, SampleStatus
from tests.rollout.fakes import ScriptedEngine
from tests.rollout.pieces import pieces

SECTION = CurriculumSection(levels=[{}, {}, {}], rate=0.2, floor=0.05)


def source(**changes):
    rows = [
        Sample(prompt=f"{level}/{i}", tokens=[1], metadata={"level": level}) for level in range(3) for i in range(5)
    ]
    levels = [str(row.metadata["level"]) for row in rows]
    return CurriculumSource(rows, 4, seed=1, shuffle=True, levels=levels, section=SECTION, **changes)


def answered(groups, chances, rng):
    """Every sample finished; solved by the chance of its level."""
    for group in groups:
        for sample in group:
            sample.status = SampleStatus.COMPLETED
            sample.reward = float(rng.random() < chances[sample.metadata["level"]])
    return groups


def steps(own, chances, count, rng):
    """Levels taken in the last of `count` steps of 40 groups."""
    for _ in range(count):
        groups = own.take(40)
        own.feedback(answered(groups, chances, rng))
    return Counter(group[0].metadata["level"] for group in groups)


def test_the_distribution_follows_the_policy():
    own, rng = source(), random.Random(0)
    assert set(own.metrics()) == {f"rollout/level/{i}/share" for i in range(3)}
    early = steps(own, {0: 0.5, 1: 0.02, 2: 0.0}, 8, rng)
    assert early[0] > 25 and early[1] + early[2] > 0, "what is sometimes solved, and a look at the rest"
    late = steps(own, {0: 1.0, 1: 0.97, 2: 0.4}, 12, rng)
    assert late[2] > 25 and late[0] < 8, "the easy levels give way"
    metrics = own.metrics()
    assert metrics["rollout/level/2/success"] == pytest.approx(0.4, abs=0.2)
    assert metrics["rollout/level/0/success"] > 0.95 and metrics["rollout/level/0/share"] < 0.15
    assert sum(v for k, v in metrics.items() if k.endswith("share")) == pytest.approx(1.0)


def test_state_is_json_and_continues_exactly():
    chances = {0: 0.9, 1: 0.3, 2: 0.0}
    straight, rng = source(), random.Random(3)
    steps(straight, chances, 5, rng)
    stored, kept = json.dumps(straight.state()), rng.getstate()
    resumed = source()
    resumed.restore(json.loads(stored))
    expected = [[s.prompt for s in g] for _ in range(3) for g in answered(straight.take(9), chances, rng)]
    rng.setstate(kept)
    assert [[s.prompt for s in g] for _ in range(3) for g in answered(resumed.take(9), chances, rng)] == expected
    assert resumed.metrics() == straight.metrics()


def test_failed_answers_tell_nothing_and_rewards_are_read_as_shares():
    own = source(reward_key="acc")
    (group,) = own.take(1)
    level = str(group[0].metadata["level"])
    for sample in group:
        sample.status, sample.reward = SampleStatus.FAILED, None
    own.feedback([group])
    assert f"rollout/level/{level}/success" not in own.metrics()
    for sample, value in zip(group, (-1.0, 1.0, 3.0, 0.5), strict=True):
        sample.status, sample.reward = SampleStatus.COMPLETED, {"score": 9.0, "acc": value}
    own.feedback([group])
    assert own.metrics()[f"rollout/level/{level}/success"] == pytest.approx(0.5 + 0.2 * (0.625 - 0.5))


def test_a_row_without_level_is_named():
    with pytest.raises(DataError, match=r"row 2 of the training data has no metadata\.level"):
        CurriculumSource(
            [Sample(), Sample()], 1, seed=0, shuffle=False, levels=["a", ""], section=CurriculumSection(key="level")
        )


def data(**curriculum):
    return DataSection(
        source="reasoning_gym:chain_sum",
        count=12,
        holdout=3,
        source_args={"allow_negation": False},
        curriculum=CurriculumSection(**curriculum),
    )


@pytest.mark.parametrize(
    "curriculum",
    [
        {"levels": [{"min_digits": d, "max_digits": d, "min_terms": 2, "max_terms": 2} for d in (1, 2, 3)]},
        {"auto_levels": 3},
    ],
)
def test_generated_rows_carry_their_level(tmp_path, curriculum):
    report = prepare(data(**curriculum), SftSection(), tmp_path, seed=0)
    assert report.kept == {"train": 12, "holdout": 3}
    rows = [row for name in ("train", "holdout") for row in read_rows(str(tmp_path / f"{name}.jsonl"))]
    assert Counter(row["metadata"]["level"] for row in rows) == {0: 5, 1: 5, 2: 5}
    digits = {level: max(len(r["label"]) for r in rows if r["metadata"]["level"] == level) for level in range(3)}
    assert digits[0] < digits[2]


def test_levels_that_there_are_not(tmp_path):
    with pytest.raises(UsageError, match=r"auto_levels = 99, but the curriculum of chain_sum has \d+ levels"):
        prepare(data(auto_levels=99), SftSection(), tmp_path, seed=0)


def test_the_collector_tells_what_became_of_every_group_dropped_ones_too():
    """All answers to level 0 are right and all to level 2 wrong: the filter drops them, the curriculum learns it."""

    async def reward(args, sample, **kwargs):
        return {0: 1.0, 1: float(sample.index % 2), 2: 0.0}[sample.metadata["level"]]

    own = source()
    keep = load_filter("zero-variance")
    recipe, _, answering = pieces(ScriptedEngine(lambda ids, params: [3]), keep=keep)
    answering.generator = dataclasses.replace(answering.generator, reward=reward)
    collection = asyncio.run(RolloutCollector(recipe, own, answering).collect(1))
    assert {g[0].metadata["level"] for g in collection.groups} == {1}
    success = {k[-9]: v for k, v in collection.metrics.items() if k.endswith("success")}
    assert success["0"] > 0.5 and success["1"] == 0.5 and success["2"] < 0.5


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"data": {"source": "reasoning_gym:chain_sum", "curriculum": {"auto_levels": 2, "key": "x"}}},
            "keep one of them",
        ),
        ({"data": {"train": "f.jsonl", "curriculum": {"auto_levels": 2}}}, "needs `data.source`"),
        ({"data": {"train": "f.jsonl", "curriculum": {"rate": 0.5}}}, "rate` has no effect without levels"),
        ({"data": {"source": "reasoning_gym:chain_sum", "curriculum": {"key": "hard"}}}, "carry no such level"),
        ({"data": {"train": "f.jsonl", "mix": {"a": 1.0}, "curriculum": {"key": "x"}}}, "both decide which prompts"),
    ],
)
def test_plan_finds_what_cannot_work(tree, message):
    assert [p for p in check_data(validate_recipe(tree), None) if message in p]
