"""Servers behind a router that leads requests by itself: which one died is found out when a request fails."""

import pytest

from slimecli.cluster.ray_engines import RoutedPool
from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.errors import SlimeError
from tests.engines.processes import said


class Through:
    """Stands for a router's address: every request needs the second server."""

    def __init__(self, pool):
        self.pool = pool

    async def generate(self, payload):
        try:
            return await self.pool.engines[1].generate(payload)
        except EngineUnreachableError:
            raise SlimeError("the router answered 503") from None


@pytest.fixture
def routed(pool):
    pair = pool(2)
    pair.pool.__class__ = RoutedPool
    pair.pool.through = Through(pair.pool)
    return pair


def test_a_dead_server_is_started_anew_and_the_request_is_answered(routed):
    expected = routed.ask(range(3))
    routed.engines[1].kill()
    answers = routed.ask(range(3))
    assert [said(a) for a in answers] == [said(a) for a in expected]
    assert routed.respawned == [1] and routed.counts["engine/lost"] == 1


def test_a_server_that_cannot_be_started_is_named(routed):
    url = routed.engines[1].url
    routed.trouble = SlimeError("no memory", "")
    routed.engines[1].kill()
    (answer,) = routed.ask([0])
    assert isinstance(answer, SlimeError), answer
    assert "router answered 503" in answer.what and url in answer.what and "no memory" in answer.what


def test_a_failure_with_all_servers_alive_stays_what_it_was(routed):
    (answer,) = routed.aio.run(_refused(routed.pool))
    assert "refused while generating" in answer.what and not routed.respawned


async def _refused(pool):
    try:
        return [await pool.generate({"input_ids": "nonsense"})]
    except SlimeError as error:
        return [error]


def test_every_answer_is_a_request_of_its_own(routed):
    """smg refuses lists of sampling parameters for servers of two kinds."""
    sent, inner = [], routed.pool.through.generate

    async def generate(payload):
        sent.append(payload)
        return await inner(payload)

    routed.pool.through.generate = generate
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    payload = {"input_ids": [[5], [6, 7]], "sampling_params": [params, {**params, "max_new_tokens": 2}]}
    replies = routed.aio.run(routed.pool.generate({**payload, "return_logprob": True}))
    assert [p["input_ids"] for p in sent] == payload["input_ids"]
    assert all(isinstance(p["sampling_params"], dict) and p["return_logprob"] for p in sent)
    assert [len(r["output_ids"]) for r in replies] == [3, 2]
    told = {}
    routed.aio.run(routed.pool.generate_stream(payload, lambda reply: told.update({reply["index"]: reply})))
    assert [told[i]["output_ids"] for i in (0, 1)] == [r["output_ids"] for r in replies]
