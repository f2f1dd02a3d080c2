"""Batches that run ahead by a timetable, and the loop thread that they run on."""

import asyncio
import threading
import time

import pytest

from slimecli.errors import SlimeError
from slimecli.rollout.ahead import AheadCollector, are_usable
from slimecli.rollout.collect import Collection, RolloutCollector
from slimecli.rollout.loop_thread import LoopThread, cancel_others
from tests.rollout.fakes import PacedEngine
from tests.rollout.pieces import collector, numbers, pieces


def open_ahead(engine, *sets, start=0, stored=None, keep=None):
    recipe, source, answering = pieces(engine, *sets, keep=keep)
    inner, kept = RolloutCollector(recipe, source, answering), []
    made = AheadCollector(recipe, inner, start=start, stored=stored or {}, store=lambda *args: kept.append(args))
    return made, kept


async def steps(made, engine, first, last, interval=1):
    """What the loop does, with an engine that takes the weights of a step only while nothing runs."""
    batches = []
    for step in range(first, last + 1):
        batches.append(await made.collect(step))
        await asyncio.sleep(0.002)
        if step % interval == 0:
            await made.rest()
            assert engine.running == 0, "weights would have changed under running answers"
            engine.version = step
        if step < last:
            await made.proceed(step)
    await made.rest()
    return batches


async def from_start(made, engine, last, interval=1):
    await made.rest()
    await made.proceed(engine.version)
    return await steps(made, engine, engine.version + 1, last, interval)


def versions(batches):
    """The version of each batch; all its answers come from one."""
    told = [{v for g in b.groups for s in g for v in s.weight_versions} for b in batches]
    assert all(len(t) == 1 for t in told)
    return [int(t.pop()) for t in told]


@pytest.mark.parametrize(
    ("staleness", "interval", "expected"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5]),
        (1, 1, [0, 0, 1, 2, 3, 4]),
        (3, 1, [0, 0, 0, 0, 1, 2]),
        (1, 2, [0, 0, 2, 2, 4, 4]),
        (2, 2, [0, 0, 0, 2, 2, 4]),
    ],
)
def test_the_batch_of_a_step_always_comes_from_the_same_weights(staleness, interval, expected):
    engine = PacedEngine(lambda ids: 3 + ids[0] % 5)
    made, kept = open_ahead(engine, f"rollout.max_staleness={staleness}", f"sync.interval={interval}", "steps=6")
    batches = asyncio.run(from_start(made, engine, 6, interval))
    assert versions(batches) == expected
    assert [step for step, *_ in kept] == [1, 2, 3, 4, 5, 6], "and none is made beyond the last step"
    ages = [b.metrics["rollout/staleness_max"] for b in batches]
    assert ages == [step - 1 - v for step, v in zip(range(1, 7), expected, strict=True)] and max(ages) <= staleness


def test_without_staleness_it_equals_the_collector_that_takes_turns():
    engine = PacedEngine(lambda ids: 3 + ids[0] % 5)
    made, _ = open_ahead(engine, "steps=3")
    ahead = asyncio.run(from_start(made, engine, 3))
    plain_engine = PacedEngine(lambda ids: 3 + ids[0] % 5)
    plain, _ = collector(plain_engine, "steps=3")

    async def in_turn():
        found = []
        for step in (1, 2, 3):
            found.append(await plain.collect(step))
            plain_engine.version = step
        return found

    turns = asyncio.run(in_turn())
    assert [b.metrics for b in ahead] == [b.metrics for b in turns]
    assert [[s.to_dict() for g in b.groups for s in g] for b in ahead] == [
        [s.to_dict() for g in b.groups for s in g] for b in turns
    ]


def test_a_checkpoint_tells_which_batches_wait_and_a_resume_goes_on_from_there():
    words = ("rollout.max_staleness=2", "steps=7")
    engine = PacedEngine(lambda ids: 3)
    straight, _kept = open_ahead(engine, *words)
    whole = asyncio.run(from_start(straight, engine, 7))
    halted = PacedEngine(lambda ids: 3)
    made, stored = open_ahead(halted, *words)

    async def three_steps():
        await made.rest()
        await made.proceed(0)
        await steps(made, halted, 1, 3)
        return made.cursor()

    cursor = asyncio.run(three_steps())
    assert cursor["ahead"] == 2
    waiting = {step: batch for step, batch, _ in stored if step in (4, 5)}
    assert set(waiting) == {4, 5} and halted.version == 3
    recipe, source, answering = pieces(halted, *words)
    source.restore(cursor["source"])
    kept_after = []
    resumed = AheadCollector(
        recipe,
        RolloutCollector(recipe, source, answering),
        start=3,
        stored=waiting,
        store=lambda *args: kept_after.append(args),
    )
    rest = asyncio.run(from_start(resumed, halted, 7))
    assert [step for step, *_ in kept_after] == [6, 7], "nothing is generated twice"
    assert [numbers(b.groups) for b in rest] == [numbers(b.groups) for b in whole[3:]], "and nothing is left out"
    assert [[s.to_dict() for g in b.groups for s in g] for b in rest] == [
        [s.to_dict() for g in b.groups for s in g] for b in whole[3:]
    ]


def test_a_checkpoint_between_two_updates_is_refused():
    engine = PacedEngine(lambda ids: 3)
    made, _ = open_ahead(engine, "rollout.max_staleness=1", "sync.interval=2", "steps=4")

    async def work():
        await made.rest()
        await made.proceed(0)
        await made.collect(1)
        with pytest.raises(SlimeError, match="multiple of sync.interval"):
            made.cursor()
        await made.collect(2)
        await made.rest()
        return made.cursor()

    assert asyncio.run(work())["ahead"] == 0


def test_generation_and_training_overlap():
    engine = PacedEngine(lambda ids: 20)
    made, _ = open_ahead(engine, "rollout.max_staleness=1", "steps=4")
    aio = LoopThread()
    aio.run(made.rest())
    aio.run(made.proceed(0))
    for step in (1, 2, 3):
        aio.run(made.collect(step))
        running = []
        for _ in range(20):  # the trainer learns, on a thread that is not the loop's
            time.sleep(0.002)
            running.append(engine.running)
        assert max(running) > 0
        aio.run(made.rest())
        engine.version = step
        aio.run(made.proceed(step))
    aio.close()


def test_what_goes_wrong_ahead_is_raised_where_it_is_waited_for():
    made, _ = open_ahead(
        PacedEngine(lambda ids: 3), "rollout.max_staleness=1", "rollout.max_filtered_rounds=1", keep=lambda a, g: False
    )

    async def work():
        await made.rest()
        await made.proceed(0)
        await made.collect(1)

    with pytest.raises(SlimeError, match="only 0 of 4 groups"):
        asyncio.run(work())


def test_batches_of_an_earlier_recipe_may_be_too_old_for_this_one():
    engine = PacedEngine(lambda ids: 3)
    made, _ = collector(engine)
    engine.version = 2
    stored = {6: Collection(groups=asyncio.run(made.collect(6, 2)).groups, metrics={})}

    def usable(*words):
        return are_usable(stored, pieces(engine, *words)[0])

    assert usable("rollout.max_staleness=3") and not usable("rollout.max_staleness=2")
    assert not usable() and not usable("rollout.max_staleness=3", "rollout.fully_async=true")
    assert are_usable({}, pieces(engine)[0])


def test_the_loop_thread_ends_what_is_left():
    aio, ended = LoopThread(), []

    async def forever():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(threading.current_thread().name)

    tasks = []

    async def begin():
        tasks.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)

    aio.run(begin())
    aio.run(cancel_others())
    assert ended == ["slime-rollout"]
    aio.run(begin())
    aio.close()
    aio.close()
    assert len(ended) == 2


def test_an_error_of_a_coroutine_is_the_callers():
    aio = LoopThread()

    async def fail():
        raise SlimeError("no", "yes")

    with pytest.raises(SlimeError, match="no"):
        aio.run(fail())
    aio.close()
