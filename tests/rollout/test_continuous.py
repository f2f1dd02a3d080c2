"""Generation that never stops."""

import asyncio
import json

import pytest

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.rollout.collect import RecordedCollector
from slimecli.rollout.continuous import ContinuousCollector
from slimecli.rundir import RunDir
from slimecli.types import Sample
from tests.rollout.fakes import PacedEngine
from tests.rollout.pieces import numbers, pieces

WORDS = ("rollout.fully_async=true", "rollout.max_staleness=2", "steps=8")


def slow_twos(ids):
    return 40 if ids[0] % 3 == 2 else 3


def open_stream(engine, *sets, start=0, state=None, keep=None):
    recipe, source, answering = pieces(engine, *WORDS, *sets, keep=keep)
    if state:
        source.restore(state["source"])
        source.give_back([[Sample.from_dict(s) for s in g] for g in state["waiting"]])
    return ContinuousCollector(recipe, source, answering, start=start), source


async def train(made, engine, first, last, learn_s=0.01, interval=1):
    batches = []
    await made.proceed(engine.version)
    for step in range(first, last + 1):
        batches.append(await made.collect(step))
        await asyncio.sleep(learn_s)
        if step % interval == 0:
            engine.version = step  # under running answers
            await made.rest()
            await made.proceed(step)
    return batches


def close(made):
    for task in list(made._flights):
        task.cancel()


def test_no_answer_is_older_than_allowed_and_none_is_dropped_for_its_length():
    engine = PacedEngine(slow_twos)
    made, _ = open_stream(engine)
    batches = asyncio.run(train(made, engine, 1, 8))
    ages = [b.metrics["rollout/staleness_max"] for b in batches]
    assert max(ages) <= 2 and max(ages) >= 1
    assert all(b.metrics["rollout/stale"] == 0 for b in batches)
    taken = [n for b in batches for n in numbers(b.groups)]
    assert sorted(taken) == list(range(32)), "each prompt once, the long ones too, and none beyond the last step"
    assert all(numbers(b.groups) == sorted(numbers(b.groups)) for b in batches)


@pytest.mark.parametrize(("interval", "staleness"), [(2, 1), (2, 2), (4, 3)])
def test_engines_may_take_every_so_many_versions(interval, staleness):
    engine = PacedEngine(slow_twos)
    made, _ = open_stream(engine, f"sync.interval={interval}", f"rollout.max_staleness={staleness}")
    batches = asyncio.run(train(made, engine, 1, 8, interval=interval))
    assert max(b.metrics["rollout/staleness_max"] for b in batches) <= staleness
    assert sorted(n for b in batches for n in numbers(b.groups)) == list(range(32))


def test_weights_change_under_running_answers_and_every_token_is_its_weights():
    engine = PacedEngine(lambda ids: 30)
    made, _ = open_stream(engine)
    batches = asyncio.run(train(made, engine, 1, 6, learn_s=0.005))
    mixed = [s for b in batches for g in b.groups for s in g if len(s.weight_versions) > 1]
    assert mixed, "no answer was under way at an update: this tests nothing"
    for sample in mixed:
        for version, start, end in sample.version_spans:
            assert set(sample.tokens[1 + start : 1 + end]) <= {100 + int(version), 2}
    assert max(b.metrics["rollout/partial_fraction"] for b in batches) > 0


def test_no_more_groups_are_begun_than_can_be_trained_on_in_time():
    engine = PacedEngine(lambda ids: 3)
    made, _ = open_stream(engine)

    async def work():
        await made.proceed(0)
        await asyncio.sleep(0.1)
        begun = {ids[0] for call in engine.calls for ids in call["input_ids"]}
        await made.collect(1)
        await asyncio.sleep(0.05)
        later = {ids[0] for call in engine.calls for ids in call["input_ids"]}
        engine.version = 1
        await made.proceed(1)
        await asyncio.sleep(0.05)
        last = {ids[0] for call in engine.calls for ids in call["input_ids"]}
        return len(begun), len(later), len(last)

    assert asyncio.run(work()) == (12, 12, 16), "3 batches ahead of weights 0, one more with weights 1"


def test_a_long_answer_is_waited_for_only_when_it_must_be():
    engine = PacedEngine(lambda ids: 60 if ids[0] == 0 else 2)
    made, _ = open_stream(engine)

    async def work():
        await made.proceed(0)
        found = []
        for step in (1, 2, 3):
            found.append((numbers((await made.collect(step)).groups), engine.running))
            await made.proceed(0)  # the weights stay: step 3 is the last that may train on answers of weights 0
        close(made)
        return found

    first, second, third = asyncio.run(work())
    assert 0 not in first[0] and 0 not in second[0] and first[1] > 0
    assert 0 in third[0]


def test_a_resume_loses_and_doubles_no_prompt():
    engine = PacedEngine(slow_twos)
    made, _ = open_stream(engine)

    async def part():
        batches = await train(made, engine, 1, 3)
        cursor = json.loads(json.dumps(made.cursor()))
        close(made)
        return batches, cursor

    before, cursor = asyncio.run(part())
    statuses = {s.get("status") for g in cursor["waiting"] for s in g}
    assert "pending" in statuses, "nothing was under way: this tests nothing"
    again = PacedEngine(slow_twos)
    again.version = 3
    resumed, _ = open_stream(again, start=3, state=cursor)
    after = asyncio.run(train(resumed, again, 4, 8))
    taken = [n for b in [*before, *after] for n in numbers(b.groups)]
    assert sorted(taken) == list(range(32))
    finished = {g[0]["group_index"] for g in cursor["waiting"] if g[0]["status"] == "completed"}
    asked = {ids[0] for call in again.calls for ids in call["input_ids"]}
    assert not finished & asked, "what was ready is not generated again"


def test_groups_that_grew_too_old_begin_anew_or_are_masked():
    async def work(*words):
        engine = PacedEngine(lambda ids: 3)
        made, _ = open_stream(engine, *words)
        await made.proceed(0)
        await asyncio.sleep(0.05)
        engine.version = 6
        await made.proceed(6)
        batch = await made.collect(7)
        close(made)
        return batch

    anew = asyncio.run(work())
    assert anew.metrics["rollout/stale"] > 0 and anew.metrics["rollout/staleness_max"] <= 2
    masked = asyncio.run(work("rollout.stale=mask"))
    assert masked.metrics["rollout/stale"] > 0
    for sample in (s for g in masked.groups for s in g if s.weight_versions == ["0"]):
        assert sample.effective_response_length == 0


def test_a_filter_is_applied_and_starving_is_an_error():
    engine = PacedEngine(lambda ids: 3)
    made, _ = open_stream(engine, "steps=2", keep=lambda args, g: g[0].group_index % 2 == 0)
    batches = asyncio.run(train(made, engine, 1, 2))
    assert all(n % 2 == 0 for b in batches for n in numbers(b.groups))
    assert sum(b.metrics.get("rollout/dropped/filter", 0) for b in batches) >= 7
    starved, _ = open_stream(engine, "rollout.max_filtered_rounds=2", keep=lambda args, g: False)
    with pytest.raises(SlimeError, match="groups were dropped before 4 were accepted"):
        asyncio.run(train(starved, engine, 1, 1))


def test_what_fails_under_way_is_raised():
    class Broken(PacedEngine):
        async def generate(self, payload):
            raise SlimeError("engine 0 died", "restart it")

    made, _ = open_stream(Broken(slow_twos))
    with pytest.raises(SlimeError, match="answers failed.*engine 0 died|were dropped"):
        asyncio.run(train(made, made._answering.generator.engine, 1, 1))

    def broken(args, group):
        raise SlimeError("the filter broke", "mend it")

    made, _ = open_stream(PacedEngine(slow_twos), keep=broken)
    with pytest.raises(SlimeError, match="the filter broke"):
        asyncio.run(train(made, made._answering.generator.engine, 1, 1))


def test_recorded_samples_bring_along_what_was_under_way(tmp_path):
    run = RunDir(tmp_path)
    state = {"step": 1, "metrics": {"x": 1.0}, "source": {"rows": 2}, "waiting": [[{"tokens": [1]}]]}
    files.write_json(run.data_state_path(1), state)
    run.write_samples(1, [[Sample(group_index=0, tokens=[1, 2], response_length=1, reward=1.0)]])
    recorded = RecordedCollector(run)
    assert asyncio.run(recorded.collect(1)).metrics == {"x": 1.0}
    assert recorded.cursor() == {"source": {"rows": 2}, "waiting": [[{"tokens": [1]}]]}
