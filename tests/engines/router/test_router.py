"""A router in front of real engines: who gets what, and what happens when an engine is lost."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.engines.processes import is_busy, is_idle, payload, said, soon, start_engine


def served(router):
    return {w["url"]: w["served"] for w in router.workers()}


@pytest.mark.parametrize("name", ["builtin", "smg", "sglang"])
def test_answers_are_those_of_the_engines_and_all_get_their_share(name, engines, router, ask):
    pair = engines(2)
    front = router(pair, name, policy="round_robin")
    direct = ask(pair[0].url, [payload(i) for i in range(20)])
    routed = ask(front.url, [payload(i) for i in range(20)])
    assert [s for s, _ in routed] == [200] * 20
    assert [said(r) for _, r in routed] == [said(r) for _, r in direct]
    if name == "builtin":
        assert served(front) == {pair[0].url: 10, pair[1].url: 10}


@pytest.mark.parametrize("name", ["builtin", "smg", "sglang"])
def test_engines_come_and_go(name, engines, router, ask):
    pair = engines(2)
    front = router(pair[:1], name)
    front.add(pair[1].url)
    front.add(pair[1].url + "/")
    assert sorted(w["url"] for w in front.workers()) == sorted(e.url for e in pair)
    front.remove(pair[0].url)
    front.remove("http://127.0.0.1:9")
    end = time.monotonic() + 10
    while [w["url"] for w in front.workers()] != [pair[1].url]:
        assert time.monotonic() < end, front.workers()
        time.sleep(0.05)
    pair[0].kill()
    assert [s for s, _ in ask(front.url, [payload(i) for i in range(5)])] == [200] * 5


@pytest.mark.parametrize("name", ["builtin", "smg"])
def test_requests_of_a_killed_engine_are_answered_by_another(name, engines, router, ask):
    pair = engines(2)
    asked = [payload(i, tokens=200) for i in range(16)]
    expected = ask(pair[0].url, asked)
    front = router(pair, name, policy="round_robin")

    async def kill():
        await soon(is_busy(pair[0]))
        await asyncio.to_thread(pair[0].kill)

    answers = ask(front.url, asked, meanwhile=kill)
    assert [said(r) for _, r in answers] == [said(r) for _, r in expected]
    assert [s for s, _ in ask(front.url, [payload(i) for i in range(8)])] == [200] * 8


def test_requests_of_a_frozen_engine_are_answered_by_another(engines, router, ask):
    pair = engines(2)
    fast = {"health_check_interval_secs": 0.2, "health_check_timeout_secs": 0.3, "health_failure_threshold": 2}
    front = router(pair, policy="round_robin", **fast)
    asked = [payload(i, tokens=200) for i in range(8)]
    expected = ask(pair[1].url, asked)

    async def freeze():
        pair[0].freeze()

    begin = time.monotonic()
    answers = ask(front.url, asked, meanwhile=freeze)
    assert [said(r) for _, r in answers] == [said(r) for _, r in expected]
    assert time.monotonic() - begin < 20
    assert {w["url"]: w["is_healthy"] for w in front.workers()} == {pair[0].url: False, pair[1].url: True}
    pair[0].thaw()
    end = time.monotonic() + 10
    while not all(w["is_healthy"] for w in front.workers()):
        assert time.monotonic() < end, "a thawed engine is taken back"
        time.sleep(0.05)


def test_requests_wait_for_an_engine_to_come_back(engines, router, ask, stock):
    (only,) = engines(1)
    front = router([only], health_check_interval_secs=0.1)
    expected = ask(only.url, [payload(1)])
    only.kill()

    async def come_back():
        await asyncio.sleep(0.5)
        again.append(await asyncio.to_thread(lambda: start_engine(stock.model, port=only.port)))

    again = []
    try:
        assert [said(r) for _, r in ask(front.url, [payload(1)], meanwhile=come_back)] == [said(expected[0][1])]
    finally:
        again[0].kill()


def test_nobody_there_is_an_error_that_names_the_engines(engines, router, ask):
    (only,) = engines(1)
    front = router([only], queue_timeout_secs=0.2)
    only.kill()
    ((status, reply),) = ask(front.url, [payload(1)])
    assert status == 503 and only.url in reply["error"]["message"]


def test_an_engines_refusal_is_passed_on(engines, router, ask):
    front = router(engines(2))
    ((status, reply),) = ask(front.url, [{"input_ids": [1], "sampling_params": {"temprature": 1}}])
    assert status == 400 and "temprature" in reply["error"]["message"]
    assert sum(served(front).values()) == 1, "what the caller did wrong is not tried elsewhere"


def test_a_session_stays_with_its_engine(engines, router, ask):
    trio = engines(3)
    front = router(trio, policy="consistent_hashing")
    for session in range(6):
        before = served(front)
        ask(front.url, [payload(i) for i in range(2)], headers={"X-SMG-Routing-Key": f"s{session}"})
        ask(front.url, [payload(3) | {"routing_key": f"s{session}"}, payload(4) | {"session_id": f"s{session}"}])
        grown = [served(front)[url] - before[url] for url in before]
        assert sorted(grown) == [0, 0, 4]


def test_streams_pass_through_as_they_come(engines, router):
    (only,) = engines(1)
    front = router([only])

    async def scene():
        stamps, events = [], []
        async with (
            aiohttp.ClientSession() as session,
            session.post(front.url + "/generate", json=payload(1, 150) | {"stream": True}) as answer,
        ):
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            async for line in answer.content:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    stamps.append(time.monotonic())
                    events.append(json.loads(line[6:]))
        return stamps, events

    stamps, events = asyncio.run(scene())
    assert len(events) > 50 and len(events[-1]["output_ids"]) == 150
    assert stamps[-1] - stamps[0] > 0.05, "the first came before the last was made"


def test_a_stream_that_breaks_does_not_look_finished(engines, router):
    pair = engines(2)
    front = router(pair, policy="round_robin")

    async def scene():
        seen = b""
        async with (
            aiohttp.ClientSession() as session,
            session.post(front.url + "/generate", json=payload(1, 250) | {"stream": True}) as answer,
        ):
            victim = next(w["url"] for w in await asyncio.to_thread(front.workers) if w["load"])
            async for line in answer.content:
                if not seen:
                    next(e for e in pair if e.url == victim).kill()
                seen += line
        return victim, seen

    victim, seen = asyncio.run(scene())
    last = [line for line in seen.split(b"\n\n") if line][-1]
    assert victim in json.loads(last[6:])["error"]["message"] and b"[DONE]" not in seen


def test_a_stream_that_takes_too_long_ends_with_an_error(engines, router):
    (only,) = engines(1)
    front = router([only], request_timeout_secs=1.0)

    async def scene():
        seen = b""
        async with (
            aiohttp.ClientSession() as session,
            session.post(front.url + "/generate", json=payload(1, 250) | {"stream": True}) as answer,
        ):
            async for line in answer.content:
                if not seen:
                    only.freeze()
                seen += line
        return seen

    try:
        seen = asyncio.run(scene())
    finally:
        only.thaw()
    last = [line for line in seen.split(b"\n\n") if line][-1]
    assert f"{only.url} did not end its answer within 1 s" in json.loads(last[6:])["error"]["message"]


def test_the_router_asks_for_its_key_and_keeps_it_off_the_command_line(engines, router, ask):
    front = router(engines(1), api_key="s3cret")
    assert [s for s, _ in ask(front.url, [payload(1)])] == [401]
    with pytest.raises(urllib.error.HTTPError, match="401"):  # any bytes may stand in a header
        urllib.request.urlopen(urllib.request.Request(front.url + "/generate", b"{}", {"Authorization": "s3cret\xff"}))
    assert [s for s, _ in ask(front.url, [payload(1)], headers={"Authorization": "Bearer s3cret"})] == [200]
    assert urllib.request.urlopen(front.url + "/health").status == 200
    assert b"s3cret" not in Path(f"/proc/{front.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_stops_when_its_client_leaves(engines, router, stream):
    (only,) = engines(1)
    front = router([only])

    async def scene():
        async with aiohttp.ClientSession() as session:
            endless = payload(1, 250) | {"stream": stream}
            many = [asyncio.ensure_future(session.post(front.url + "/generate", json=endless)) for _ in range(4)]
            await soon(is_busy(only))
            for one in many:
                one.cancel()
            found = await asyncio.gather(*many, return_exceptions=True)
            for answer in found:
                if isinstance(answer, aiohttp.ClientResponse):
                    answer.close()
            begin = time.monotonic()
            await soon(is_idle(only))
            return time.monotonic() - begin

    assert asyncio.run(scene()) < 5 and front.workers()[0]["load"] == 0


def test_control_calls_go_everywhere_or_nowhere(engines, router, ask):
    pair = engines(2)
    front = router(pair)
    ((status, reply),) = ask(front.url, [{"abort_all": True}], path="/abort_request")
    assert status == 200 and set(reply["workers"]) == {e.url for e in pair}
    ((status, reply),) = ask(front.url, [{"model_path": "x"}], path="/update_weights_from_disk")
    assert status == 404 and "GET /workers" in reply["error"]["message"]
    front = router([])
    ((status, reply),) = ask(front.url, [{"abort_all": True}], path="/abort_request")
    assert status == 503 and "reached nobody" in reply["error"]["message"]


def test_more_than_it_may_hold_is_turned_away(engines, router, ask):
    front = router(engines(1), max_concurrent_requests=3)
    counted = Counter(s for s, _ in ask(front.url, [payload(i, 100) for i in range(10)]))
    assert counted[200] >= 3 and counted[429] >= 1 and counted.total() == 10
    front = router(engines(1), max_buffered_request_bytes=1000, max_payload_size=2000)
    long = payload(1) | {"input_ids": [1] * 400}
    assert [s for s, _ in ask(front.url, [long])] == [429]
    assert [s for s, _ in ask(front.url, [payload(1) | {"input_ids": [1] * 1000}])] == [413]
    assert [s for s, _ in ask(front.url, [payload(1)])] == [200]


def test_a_thousand_requests_at_once_none_lost_none_doubled(engines, router, ask):
    trio = engines(3)
    front = router(trio, policy="least_load")
    answers = ask(front.url, [payload(i, 2) | {"rid": f"r{i}"} for i in range(1000)])
    assert [(s, r["meta_info"]["id"]) for s, r in answers] == [(200, f"r{i}") for i in range(1000)]
    counts = served(front)
    assert sum(counts.values()) == 1000 and min(counts.values()) > 200
    again = ask(trio[0].url, [payload(i, 2) for i in range(0, 1000, 97)])
    assert [said(r) for _, r in answers[::97]] == [said(r) for _, r in again]
