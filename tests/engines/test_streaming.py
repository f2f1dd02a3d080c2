"""Streams of /generate: whole or in increments, over HTTP or in this process; and what continues an answer."""

import asyncio
import json

import pytest
from aiohttp import web

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import EngineRefusedError, EngineUnreachableError, HttpEngine
from slimecli.engines.pool import EnginePool
from slimecli.engines.streaming import going_on, grown
from slimecli.errors import SlimeError
from tests.engines.processes import said


@pytest.fixture
def own(models):
    engine = EmbeddedEngine(models("llama"), slots=4, max_context=256)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(params=["in_process", "http", "pool"])
def engine(request, own):
    if request.param == "in_process":
        yield own
    elif request.param == "pool":
        yield EnginePool([own, own])
    else:
        url, stop = start_server_thread(own)
        client = HttpEngine(url, timeout_s=20)
        yield client
        asyncio.run(client.close())
        stop()


def request(count=3, tokens=12, **params):
    each = [{"max_new_tokens": tokens, "sampling_seed": i, "ignore_eos": True, **params} for i in range(count)]
    return {"input_ids": [[5, 7, 9]] * count, "sampling_params": each, "return_logprob": True}


async def listened(engine, payload):
    """(last reply of every answer, how many were told)."""
    found, told = {}, []

    def tell(reply):
        told.append(reply["index"])
        found[reply["index"]] = reply

    await engine.generate_stream(payload, tell)
    return [found[i] for i in range(len(payload["input_ids"]))], len(told)


def test_a_stream_ends_with_what_generate_gives(engine, own):
    async def scene():
        return await own.generate(request()), await listened(engine, request())

    whole, (streamed, told) = asyncio.run(scene())
    assert told == 36, "not token by token"
    for one, other in zip(streamed, whole, strict=True):
        assert said(one) == said(other) and one["text"] == other["text"]
        for name in ("finish_reason", "weight_versions", "completion_tokens"):
            assert one["meta_info"][name] == other["meta_info"][name]


def test_a_seeded_answer_goes_on_as_if_it_had_not_been_cut(own):
    async def scene():
        (whole,) = await own.generate(request(1, 40))
        payload = request(1, 40 - 15)
        payload["input_ids"] = [[5, 7, 9, *whole["output_ids"][:15]]]
        (anew,) = await own.generate(payload)
        payload["sampling_params"] = [going_on(p, 15) for p in payload["sampling_params"]]
        (rest,) = await own.generate(payload)
        return whole["output_ids"][15:], rest["output_ids"], anew["output_ids"]

    expected, rest, anew = asyncio.run(scene())
    assert rest == expected and anew != expected
    assert going_on(going_on({}, 3), 4) == {"custom_params": {"said_before": 7}} and going_on({"n": 1}, 0) == {"n": 1}


@pytest.mark.parametrize("custom", [{"said_before": -1}, {"said_before": "x"}, {"other": 1}, 3])
def test_custom_parameters_that_are_not_known_are_refused(own, custom):
    with pytest.raises(SlimeError, match="said_before"):
        asyncio.run(own.generate(request(1, custom_params=custom)))


def item(ids, total, version="1"):
    triples = [[-0.5, i, None] for i in ids]
    meta = {"completion_tokens": total, "output_token_logprobs": triples, "weight_version": version}
    return {"output_ids": ids, "text": "".join(f"<{i}>" for i in ids), "meta_info": {"finish_reason": None, **meta}}


def test_whole_and_incremental_events_make_the_same_reply():
    whole = incremental = None
    for ids, new, version in (([4], [4], "1"), ([4, 5, 6], [5, 6], "1"), ([4, 5, 6, 7], [7], "2")):
        whole = grown(whole, item(ids, len(ids), version))
        incremental = grown(incremental, item(new, len(ids), version))
    assert whole == incremental and whole["output_ids"] == [4, 5, 6, 7] and whole["text"] == "<4><5><6><7>"
    spans = [("1", 0, 3), ("2", 3, 4)]
    assert [(s["version"], s["start"], s["end"]) for s in whole["meta_info"]["weight_versions"]] == spans
    with pytest.raises(SlimeError, match="2 tokens after 4, and says that it has 9"):
        grown(whole, item([1, 2], 9))


def served(lines):
    """Ask a server that streams these lines; (replies, times asked)."""

    async def scene():
        asked, found = [], []

        async def generate(got):
            asked.append(await got.json())
            answer = web.StreamResponse()
            await answer.prepare(got)
            for line in lines:
                await answer.write(
                    b"data: " + (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n\n"
                )
            return answer

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = HttpEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=5, retries=1)
        try:
            await client.generate_stream(request(1, 6), found.append)
        except SlimeError as error:
            return error, found, asked
        finally:
            await client.close()
            await runner.cleanup()
        return None, found, asked

    return asyncio.run(scene())


def test_a_stream_that_ends_too_early_is_continued():
    error, found, asked = served([item([4, 5], 2)])
    assert isinstance(error, EngineUnreachableError) and found[-1]["output_ids"] == [4, 5, 4, 5]
    assert [a["input_ids"] for a in asked] == [[[5, 7, 9]], [[5, 7, 9, 4, 5]]]
    assert [a["sampling_params"][0]["max_new_tokens"] for a in asked] == [6, 4]
    error, found, _ = served([item([4, 5], 2), {"error": {"message": "the worker is lost"}}])
    assert "the worker is lost" in error.what and found[-1]["pieces"] == 2


def test_an_event_whose_tokens_run_ahead_of_it_is_passed_over():
    """Real SGLang sends such now and then; nothing of it may be told twice when its engine is lost after it."""
    ahead = {**item([4, 5, 6], 2), "meta_info": item([4, 5], 2)["meta_info"]}
    last = item([4, 5, 6, 7, 8, 9], 6)
    last["meta_info"]["finish_reason"] = {"type": "length", "length": 6}
    error, found, asked = served([item([4], 1), ahead, last, b"[DONE]"])
    assert error is None and len(asked) == 1
    assert [reply["output_ids"] for reply in found] == [[4], [4, 5, 6, 7, 8, 9]]
    _, found, asked = served([item([4], 1), ahead])
    assert [a["input_ids"] for a in asked] == [[[5, 7, 9]], [[5, 7, 9, 4]]]
    assert found[-1]["text"] == "<4><4>"
    ahead["meta_info"]["finish_reason"] = {"type": "stop"}
    assert "3 tokens after 0, and says that it has 2" in served([ahead, b"[DONE]"])[0].what


def test_an_answer_that_has_all_its_tokens_is_not_asked_for_again():
    error, found, asked = served([item([4, 5, 6, 7, 8, 9], 6)])
    assert error is None and len(asked) == 1
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_what_is_wrong_with_a_stream_is_told():
    error, _, asked = served([{"error": {"message": "too long", "code": 400}}])
    assert isinstance(error, EngineRefusedError) and "too long" in error.what and len(asked) == 1
    assert "not JSON" in served([b"{nonsense"])[0].what
    assert "no reply of /generate" in served([{"text": "x"}, b"[DONE]"])[0].what
