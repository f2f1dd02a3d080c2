"""Requests that run while weights change: an answer is of one version, unless it was to go on; then it says so."""

import asyncio

import pytest
from safetensors.torch import load_file

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.embedded.weights import Incoming, headers_of
from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate

ANSWER = 150
PARAMS = {"max_new_tokens": ANSWER, "ignore_eos": True, "sampling_seed": 1}


@pytest.fixture(params=["in_process", "http"])
def engine(request, models):
    """Two slots; `.own` is the engine itself."""
    own = EmbeddedEngine(models("llama"), slots=2, max_context=256)
    if request.param == "in_process":
        own.own = own
        yield own
        asyncio.run(own.close())
        return
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    client.own = own
    yield client
    asyncio.run(client.close())
    stop()


def ask(engine, prompt):
    return asyncio.create_task(engine.generate({"input_ids": [prompt, 9], "sampling_params": PARAMS}))


async def under_way(engine, tokens=5):
    """Wait until something has been said since the last call."""
    begin = engine.own.info()["generated_tokens"]
    while engine.own.info()["generated_tokens"] < begin + tokens:
        await asyncio.sleep(0.002)


async def scene(engine, update):
    """Three requests for two slots, an update in their midst, one request that comes during it, one after it."""
    early = [ask(engine, prompt) for prompt in (3, 4, 5)]
    await under_way(engine)
    updating = asyncio.create_task(engine.update_weights(update))
    await asyncio.sleep(0)
    meanwhile = ask(engine, 6)
    receipt = await updating
    later = ask(engine, 7)
    replies = [await task for task in (*early, meanwhile, later)]
    return receipt, [reply["meta_info"] for reply in replies]


def versions(metas):
    return [[span["version"] for span in meta["weight_versions"]] for meta in metas]


def update(models, **how):
    return WeightUpdate(kind="disk", version=1, folder=models("llama", seed=1), **how)


def test_running_answers_are_waited_for(engine, models):
    receipt, metas = asyncio.run(scene(engine, update(models)))
    assert [m["finish_reason"]["type"] for m in metas] == ["length"] * 5
    assert versions(metas) == [["0"], ["0"], ["1"], ["1"], ["1"]], "those that wait, wait for the new weights"
    assert all(meta["num_retractions"] == 0 for meta in metas)
    assert receipt.version == 1 and 0 < receipt.pause_seconds <= receipt.seconds + 5


def test_running_answers_are_ended(engine, models):
    _, metas = asyncio.run(scene(engine, update(models, abort_running=True)))
    assert [m["finish_reason"]["type"] for m in metas[:3]] == ["abort"] * 3
    assert metas[-1]["finish_reason"]["type"] == "length"
    assert all(len(spoken) <= 1 for spoken in versions(metas)) and versions(metas)[-1] == ["1"]
    assert 0 < metas[0]["completion_tokens"] < ANSWER


def test_running_answers_go_on_and_say_who_spoke(engine, models):
    _, metas = asyncio.run(scene(engine, update(models, in_flight=True)))
    assert [m["finish_reason"]["type"] for m in metas] == ["length"] * 5
    assert versions(metas)[:2] == [["0", "1"], ["0", "1"]] and versions(metas)[-1] == ["1"]
    for meta in metas[:2]:
        old, new = meta["weight_versions"]
        assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == ANSWER
        assert meta["num_retractions"] == 1, "its cache is of the new weights as well"


@pytest.mark.parametrize("running", ["finish", "continue"])
def test_a_refused_update_lets_the_engine_go_on(engine, models, running):
    wrong = WeightUpdate(
        kind="disk", version=1, folder=models("llama", hidden_size=32), in_flight=running == "continue"
    )

    async def refused():
        task = ask(engine, 3)
        await under_way(engine)
        with pytest.raises(SlimeError, match="shape"):
            await engine.update_weights(wrong)
        return await task, await ask(engine, 4)

    for reply in asyncio.run(refused()):
        assert [s["version"] for s in reply["meta_info"]["weight_versions"]] == ["0"]
        assert reply["meta_info"]["completion_tokens"] == ANSWER


def test_answers_on_half_loaded_weights_end_with_an_error(models):
    """They were to go on with the new weights, and there are none."""
    own = EmbeddedEngine(models("llama"), slots=2, max_context=256)
    own.own = own
    tensors = load_file(models("llama", seed=1) / "model.safetensors")

    def torn():
        yield from list(tensors.items())[:5]
        raise SlimeError("the link is gone")

    async def scene():
        task = ask(own, 3)
        await under_way(own)
        half = Incoming(headers=headers_of(tensors), tensors=torn())
        with pytest.raises(SlimeError, match="link"):
            await own.weights._take(lambda: [half], "1", "continue")
        with pytest.raises(SlimeError, match="half-way"):
            await task
        await own.update_weights(update(models))
        reply = await ask(own, 4)
        await own.close()
        return reply

    assert asyncio.run(scene())["meta_info"]["weight_version"] == "1"


def test_an_update_in_parts_waits_as_well(engine, models):
    if isinstance(engine, EmbeddedEngine):
        begin, end = engine.weights.begin, engine.weights.end
    else:
        begin = lambda: engine.call("POST", "/begin_weight_update", {"running": "finish"}, "being tested")  # noqa: E731
        end = lambda: engine.call("POST", "/end_weight_update", {}, "being tested")  # noqa: E731

    async def parts():
        early = ask(engine, 3)
        await under_way(engine)
        await begin()
        assert early.done() or engine.own.info()["running"] == 0
        during = ask(engine, 4)
        said = engine.own.info()["generated_tokens"]
        await asyncio.sleep(0.05)
        assert engine.own.info()["generated_tokens"] == said, "nothing is generated between begin and end"
        await end()
        return await early, await during

    for reply in asyncio.run(parts()):
        assert reply["meta_info"]["completion_tokens"] == ANSWER


def test_two_updates_at_once_are_not_mixed(models):
    own = EmbeddedEngine(models("llama"), slots=2, max_context=256)
    own.own = own

    async def both():
        task = ask(own, 3)
        await under_way(own)
        answers = await asyncio.gather(*(own.update_weights(update(models)) for _ in range(2)), return_exceptions=True)
        reply = await task
        held = await own.fingerprint()
        await own.close()
        return answers, reply, held

    answers, reply, held = asyncio.run(both())
    assert own.info()["paused"] == [], "who was refused has not let the other's engine go, and the other has"
    done = [a for a in answers if not isinstance(a, SlimeError)]
    assert done and all(a.fingerprint == held for a in done)
    assert all("in progress" in str(a) for a in answers if isinstance(a, SlimeError))
    assert [s["version"] for s in reply["meta_info"]["weight_versions"]] == ["0"]


def test_an_update_that_is_given_up_while_it_waits_lets_the_engine_go_on(models):
    own = EmbeddedEngine(models("llama"), slots=2, max_context=256)
    own.own = own

    async def scene():
        early = [ask(own, prompt) for prompt in (3, 4)]
        await under_way(own)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(own.update_weights(update(models)), 0.01)
        queued = ask(own, 5)
        replies = [await task for task in (*early, queued)]
        await own.close()
        return [reply["meta_info"] for reply in replies]

    metas = asyncio.run(scene())
    assert versions(metas) == [["0"]] * 3 and {meta["completion_tokens"] for meta in metas} == {ANSWER}


def test_an_update_during_another_is_refused_and_leaves_it_alone(models):
    own = EmbeddedEngine(models("llama"), slots=2, max_context=256)
    own.own = own

    async def scene():
        await own.weights.halt("finish")
        with pytest.raises(SlimeError, match="in progress"):
            await own.update_weights(update(models))
        waiting = ask(own, 3)
        await asyncio.sleep(0.05)
        said = own.info()["generated_tokens"]
        await own.weights.go(True)
        reply = await waiting
        await own.close()
        return said, reply["meta_info"]["completion_tokens"]

    assert asyncio.run(scene()) == (0, ANSWER)
