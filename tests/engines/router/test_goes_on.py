"""A streamed answer whose engine is killed: another engine behind the router says the rest, within a bounded budget."""

import asyncio

import pytest

from slimecli.agents.text_engine import HttpStream
from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineUnreachableError
from tests.engines.processes import is_busy, is_idle, soon

SAID = {"max_new_tokens": 200, "sampling_seed": 7, "ignore_eos": True}
PAYLOAD = {"input_ids": [5, 7, 9], "sampling_params": SAID, "return_logprob": True, "routing_key": "anna"}


async def stream(url, retries, kill=None):
    """The replies so far; `kill` is called once some tokens were told."""
    found, client = [], HttpEngine(url, timeout_s=60, retries=retries)
    try:
        async for item in HttpStream(client)(PAYLOAD):
            found.append(item)
            if kill is not None and len(item["output_ids"]) > 5:
                kill, now = None, kill
                await now()
    finally:
        await client.close()
    return found


def test_another_engine_says_the_rest(engines, router):
    pair = engines(2)
    straight = asyncio.run(stream(pair[0].url, 0))[-1]
    front = router(pair)

    async def kill():
        busy = await asyncio.gather(*(is_busy(e)() for e in pair))
        assert sorted(busy) == [False, True]
        await asyncio.to_thread(pair[busy.index(True)].kill)

    told = asyncio.run(stream(front.url, 2, kill))
    assert [len(t["output_ids"]) for t in told] == sorted(len(t["output_ids"]) for t in told)
    last = told[-1]
    assert last["pieces"] == 2 and last["output_ids"] == straight["output_ids"] and last["text"] == straight["text"]
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert (last["meta_info"]["prompt_tokens"], last["meta_info"]["completion_tokens"]) == (3, 200)
    ours, theirs = (r["meta_info"]["output_token_logprobs"] for r in (last, straight))
    assert [t[1] for t in ours] == last["output_ids"]
    assert [t[0] for t in ours] == pytest.approx([t[0] for t in theirs], abs=1e-4)


def test_the_budget_is_bounded(engines, router):
    (only,) = engines(1)

    async def kill():
        await asyncio.to_thread(only.kill)

    with pytest.raises(EngineUnreachableError, match="no connection|broke off"):
        asyncio.run(stream(only.url, 2, kill))


def test_who_leaves_stops_the_engine(engines):
    (only,) = engines(1)

    async def scene():
        client = HttpEngine(only.url, timeout_s=60)
        answers = HttpStream(client)(PAYLOAD)
        await anext(answers)
        await answers.aclose()
        await soon(is_idle(only))
        await client.close()

    asyncio.run(scene())
