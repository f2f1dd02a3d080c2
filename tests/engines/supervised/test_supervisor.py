"""Engines that die or fall silent under a supervised pool: answers stay the same, and nobody is stale."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from slimecli.engines.attached import attach
from slimecli.engines.http import HttpEngine
from slimecli.engines.seats import EnginesLostError
from slimecli.errors import SlimeError
from slimecli.publishing import load_folder
from slimecli.recipe import load_recipe
from slimecli.rollout.args import HookArgs
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.engines.processes import is_busy, payload, said, soon, start_engine


def held(pool):
    """(version, fingerprint) of every engine, asked of the engines themselves."""

    async def look():
        found = []
        for engine in pool.pool.engines:
            info = await engine.info()
            found.append((int(info["weight_version"]), await engine.fingerprint()))
        return found

    return pool.aio.run(look())


def asleep(pool):
    """What every engine has given up."""

    async def look():
        return [(await engine.info())["asleep"] for engine in pool.pool.engines]

    return pool.aio.run(look())


class Router:
    """What a router would be told."""

    def __init__(self):
        self.told = []

    def add(self, url):
        self.told.append(("new", url))

    def remove(self, url):
        self.told.append(("gone", url))


def test_an_engine_killed_in_mid_rollout_changes_no_answer(pool, publish, folders, capsys):
    pair = pool(2)
    publish(pair, 7)
    expected = pair.ask(range(16), tokens=150)
    victim = pair.engines[1]

    async def kill():
        await soon(is_busy(victim))
        victim.kill()

    answers = pair.ask(range(16), tokens=150, meanwhile=kill)
    assert [said(a) for a in answers] == [said(a) for a in expected]
    assert {a["meta_info"]["weight_version"] for a in answers} == {"7"}
    pair.settle()
    want = fingerprint(HfFolder(folders[1]).iterate())
    assert held(pair) == [(7, want)] * 2, "the new engine was started on other weights"
    told = capsys.readouterr().err
    assert f"engine 1 at {victim.url} died" in told and "holds version 7" in told and "restarted in" in told
    assert pair.counts["engine/lost"] == 1 and pair.counts["engine/restarts"] == 1
    assert [said(a) for a in pair.ask(range(16), tokens=150)] == [said(a) for a in expected]


def test_a_silent_engine_is_given_up_after_its_deadline(pool, publish):
    pair = pool(2, deadline_s=2)
    publish(pair, 1)
    expected = pair.ask(range(8), tokens=100)
    victim = pair.engines[0]

    async def freeze():
        victim.freeze()

    begin = time.monotonic()
    answers = pair.ask(range(8), tokens=100, meanwhile=freeze)
    assert [said(a) for a in answers] == [said(a) for a in expected]
    # silence counts from the last look that was answered, which may lie before it began
    assert 1.5 <= time.monotonic() - begin < 20
    assert "no answer to health checks" in pair.pool.seats[0].why
    pair.settle()
    assert not victim.lives and pair.respawned == [0]


def test_the_only_engine_is_waited_for(pool, publish):
    one = pool(1)
    publish(one, 3)
    expected = one.ask(range(4))

    async def kill():
        one.engines[0].kill()

    assert [said(a) for a in one.ask(range(4), meanwhile=kill)] == [said(a) for a in expected]
    assert held(one)[0][0] == 3
    args = HookArgs(load_recipe("", ()), "127.0.0.1", 1, engine=one.pool)
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == one.engines[0].url, "hooks find it"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_restart_that_fails_by_a_bug_is_waited_for_by_nobody(pool):
    one = pool(1)
    one.trouble = ZeroDivisionError("a bug")
    one.engines[0].kill()
    begin = time.monotonic()
    (answer,) = one.ask([1])
    assert isinstance(answer, EnginesLostError) and "ZeroDivisionError: a bug" in answer.what
    one.pool.seats[0].thread.join(5)
    assert time.monotonic() - begin < 10


def test_stop_ends_everything_and_names_the_engine(pool, publish):
    pair = pool(2, restart=False)
    publish(pair, 1)
    victim = pair.engines[1]

    async def kill():
        await soon(is_busy(victim))
        victim.kill()

    answers = pair.ask(range(8), tokens=150, meanwhile=kill)
    lost = [a for a in answers if isinstance(a, EnginesLostError)]
    assert lost and victim.url in lost[0].what and "--resume" in lost[0].fix and "on_failure" in lost[0].fix
    assert isinstance(pair.ask([1])[0], EnginesLostError), "and so does everything after it"
    with pytest.raises(EnginesLostError, match=victim.url):
        publish(pair, 2)
    assert pair.respawned == []


def test_what_ends_the_run_from_another_thread_ends_requests_in_flight(pool, publish):
    """A cluster whose head is gone: the engine that was asked may never answer, nor break its connection."""
    one = pool(1, deadline_s=60)
    publish(one, 1)

    async def lose_the_head():
        await soon(is_busy(one.engines[0]))
        one.engines[0].freeze()
        await asyncio.to_thread(one.pool.stop, SlimeError("the head is gone", "start it again"))

    begin = time.monotonic()
    (error,) = one.ask(range(1), tokens=150, meanwhile=lose_the_head)
    assert isinstance(error, EnginesLostError) and (error.what, error.fix) == ("the head is gone", "start it again")
    assert time.monotonic() - begin < 15, "its deadlines are a minute and half a minute away"
    assert one.respawned == []


def test_when_no_engine_can_be_had_all_are_named(pool, capsys):
    pair = pool(2, max_restarts=1)
    pair.trouble = SlimeError("no memory for another engine")
    for engine in pair.engines:
        engine.kill()
    answers = pair.ask(range(3))
    assert all(isinstance(a, EnginesLostError) for a in answers)
    assert all(e.url in answers[0].what for e in pair.engines) and "no memory" in answers[0].what
    assert "engine.max_restarts = 1" in capsys.readouterr().err


def test_an_engine_that_cannot_be_restarted_is_left_out(pool, publish):
    pair = pool(2, max_restarts=1)
    pair.trouble = SlimeError("no memory")
    pair.engines[1].kill()
    assert all(isinstance(a, dict) for a in pair.ask(range(8)))
    end = time.monotonic() + 5
    while pair.pool.seats[1].state != "out":
        assert time.monotonic() < end
        time.sleep(0.01)
    assert publish(pair, 5).receipts[0].version == 5
    assert {a["meta_info"]["weight_version"] for a in pair.ask(range(8))} == {"5"}


def test_a_request_that_ends_every_engine_fails_by_itself(pool):
    pair = pool(2, retries=1, max_restarts=5)

    async def assassin(payload):
        for engine in pair.engines:
            if engine.lives:
                engine.kill()
        return await HttpEngine.generate(pair.pool.engines[0], payload)

    async def scene():
        for client in pair.pool.engines:
            client.generate = assassin
        with pytest.raises(SlimeError, match="lost its engine 2 times") as caught:
            await pair.pool._ask(0, lambda e: e.generate({"input_ids": [1], "sampling_params": {}}), 1)
        return caught.value

    assert not isinstance(pair.aio.run(scene()), EnginesLostError), "one answer has failed, not the run"


@pytest.mark.parametrize("kind", ["disk", "disk_delta", "shared_memory", "tensor", "distributed"])
def test_an_engine_that_dies_before_a_sync_gets_these_weights_later(pool, publish, folders, kind):
    pair = pool(2)
    publish(pair, 1, kind=kind, model=0)
    pair.engines[0].kill()
    delivered = publish(pair, 2, kind=kind)
    assert [r.version for r in delivered.receipts] == [2], "the other one does not wait"
    pair.settle()
    assert held(pair) == [(2, fingerprint(HfFolder(folders[1]).iterate()))] * 2
    publish(pair, 3, kind=kind, model=0)
    assert held(pair) == [(3, fingerprint(HfFolder(folders[0]).iterate()))] * 2


@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_an_engine_that_dies_in_mid_sync_is_never_stale(pool, publish, folders, kind):
    pair = pool(2)
    publish(pair, 1, kind=kind, model=0)
    pending = [pair.engines[1]]

    def kill_once(kind):
        if pending:
            pending.pop().kill()

    publish(pair, 2, kind=kind, stage=kill_once)
    pair.settle()
    assert held(pair) == [(2, fingerprint(HfFolder(folders[1]).iterate()))] * 2


def test_a_restarted_engine_whose_weights_are_gone_waits_for_the_next_ones(pool, publish):
    pair = pool(2)
    publish(pair, 1, model=0)

    def gone():
        raise SlimeError("the trainer has gone on")

    pair.pool.current, pair.pool.router = gone, Router()
    router = pair.pool.router
    old = pair.engines[1]
    old.kill()
    pair.ask(range(4))
    end = time.monotonic() + 20
    while pair.pool.seats[1].state != "stale":
        assert time.monotonic() < end, pair.pool.seats
        time.sleep(0.01)
    pair.pool.seats[1].thread.join(20)
    assert {a["meta_info"]["weight_version"] for a in pair.ask(range(8))} == {"1"}, "it is not asked"
    assert router.told == [("gone", old.url)], "nor does the router ask it"
    pair.aio.run(pair.pool.sleep())
    assert asleep(pair) == [["kv_cache", "weights"]] * 2, "its memory is asked back as well"
    pair.aio.run(pair.pool.wake())
    publish(pair, 2)
    assert [v for v, _ in held(pair)] == [2, 2] and pair.pool.seats[1].state == "up"
    assert router.told[1:] == [("new", pair.engines[1].url)] and asleep(pair) == [[], []]
    pair.pool.router = None


def test_memory_is_asked_back_from_an_engine_that_is_just_being_started(pool, publish):
    pair = pool(2)
    publish(pair, 1)
    pair.engines[1].kill()
    pair.aio.run(pair.pool.abort())  # who asks it finds it dead
    assert pair.pool.seats[1].state == "down"
    pair.aio.run(pair.pool.sleep())
    assert [s.state for s in pair.pool.seats] == ["up", "up"] and asleep(pair) == [["kv_cache", "weights"]] * 2
    pair.aio.run(pair.pool.wake())
    publish(pair, 2)
    assert [v for v, _ in held(pair)] == [2, 2]


def test_a_refusal_in_a_sync_is_an_error_and_no_reason_to_restart(pool, publish, folders):
    pair = pool(2)
    publish(pair, 1)
    wrong = HttpEngine.update_weights

    async def refuse(update):
        await wrong(pair.pool.engines[1], update)
        raise SlimeError("one tensor is corrupt")

    pair.pool.engines[1].update_weights = refuse
    with pytest.raises(SlimeError, match=rf"version 2 failed: engine 1 at {pair.engines[1].url}: one tensor is corr"):
        publish(pair, 2)
    assert pair.respawned == []


def test_control_calls_go_to_the_living(pool, publish):
    pair = pool(2)
    publish(pair, 1)
    pair.engines[0].kill()
    pair.aio.run(pair.pool.abort())
    pair.settle()
    assert pair.respawned == [0]
    pair.aio.run(pair.pool.sleep(("kv_cache",)))
    pair.engines[1].kill()
    pair.aio.run(pair.pool.abort())
    time.sleep(0.3)
    assert pair.respawned == [0] and pair.pool.seats[1].state == "down", "memory was asked back: no restart now"
    pair.aio.run(pair.pool.wake(("kv_cache",)))
    pair.settle()
    assert [v for v, _ in held(pair)] == [1, 1]
    assert all(isinstance(a, dict) for a in pair.ask(range(4)))


def test_a_group_stays_together_on_a_living_engine(pool):
    trio = pool(3)
    trio.engines[1].kill()

    async def scene():
        prompts = [[5, 6, 7]] * 6
        params = [{"max_new_tokens": 4, "sampling_seed": i} for i in range(6)]
        return await asyncio.gather(
            *(trio.pool.generate({"input_ids": prompts, "sampling_params": params}) for _ in range(3)),
            trio.pool.generate({"input_ids": [[i + 3] for i in range(6)], "sampling_params": params}),
        )

    answers = trio.aio.run(scene())
    assert [len(a) for a in answers] == [6] * 4 and answers[0] != answers[3]
    assert [r["output_ids"] for r in answers[0]] == [r["output_ids"] for r in answers[1]]


def test_an_engine_that_others_run_takes_part_again_when_it_answers_again(stock, publish, folders, tmp_path):
    pair = stock.take(2)
    sets = ("engine.health_interval_s=0.2", "engine.start_timeout_s=20", f"engine.urls={[e.url for e in pair]}")
    pool = attach(load_recipe("", sets), log=tmp_path / "engines.log")
    with asyncio.Runner() as aio:
        front = SimpleNamespace(pool=pool, aio=aio)
        publish(front, 4)
        pair[0].kill()
        asked = [pool.generate(payload(i)) for i in range(6)]

        async def scene():
            answers = await asyncio.gather(*asked)
            stock.adopt(await asyncio.to_thread(start_engine, folders[0], port=pair[0].port))
            await soon(all_up)
            return answers

        async def all_up():
            return all(s.state == "up" for s in pool.seats)

        assert {a["meta_info"]["weight_version"] for a in aio.run(scene())} == {"4"}
        assert held(front) == [(4, fingerprint(HfFolder(folders[1]).iterate()))] * 2
        aio.run(pool.close())
    pool.seats[0].thread.join(10)
    assert f"engine 0 at {pair[0].url} died" in (tmp_path / "engines.log").read_text()


def test_an_engine_that_was_started_anew_between_two_requests_is_not_believed(stock, publish, folders, tmp_path):
    """Nobody asked it anything while it was gone: all that tells is the version in its answers."""
    pair = stock.take(2)
    pool = attach(load_recipe("", (f"engine.urls={[e.url for e in pair]}",)), log=tmp_path / "engines.log")
    with asyncio.Runner() as aio:
        front = SimpleNamespace(pool=pool, aio=aio)
        publish(front, 4)
        pair[0].kill()
        stock.adopt(start_engine(folders[0], port=pair[0].port))
        assert {a["meta_info"]["weight_version"] for a in aio.run(_six(pool))} == {"4"}
        pool.seats[0].thread.join(20)
        assert held(front) == [(4, fingerprint(HfFolder(folders[1]).iterate()))] * 2
        aio.run(pool.close())
    assert "answers with weights of version 0, not 4" in (tmp_path / "engines.log").read_text()


def test_engines_that_come_back_take_the_folder_that_the_others_took(stock, folders, tmp_path):
    """`slime rollout` of a step: nothing is published after its weights were loaded."""
    pair = stock.take(2)
    sets = ("engine.start_timeout_s=20", "engine.health_interval_s=0.2", f"engine.urls={[e.url for e in pair]}")
    pool = attach(load_recipe("", sets), log=tmp_path / "engines.log")
    with asyncio.Runner() as aio:
        aio.run(load_folder(pool, 5, folders[1]))
        expected = [said(a) for a in aio.run(_six(pool))]
        pair[0].kill()
        stock.adopt(start_engine(folders[0], port=pair[0].port))
        answers = aio.run(_six(pool))
        assert [said(a) for a in answers] == expected
        assert {a["meta_info"]["weight_version"] for a in answers} == {"5"}
        pool.seats[0].thread.join(20)
        front = SimpleNamespace(pool=pool, aio=aio)
        assert held(front) == [(5, fingerprint(HfFolder(folders[1]).iterate()))] * 2
        aio.run(pool.close())


async def _six(pool):
    return await asyncio.gather(*(pool.generate(payload(i)) for i in range(6)))
