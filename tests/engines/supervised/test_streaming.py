"""Streamed answers of engines that die under them: what was said is kept, and the rest is what it would have been."""

import asyncio

import pytest

from slimecli.engines.http import HttpEngine
from slimecli.engines.seats import EnginesLostError
from tests.engines.processes import payload, said


def group(numbers, tokens):
    """A list payload, and what reads its answers back."""
    parts = [payload(i, tokens) for i in numbers]
    return {
        "input_ids": [p["input_ids"] for p in parts],
        "sampling_params": [p["sampling_params"] for p in parts],
        "return_logprob": True,
    }


def listen(pool, request, after=None, then=None):
    """(last reply of every answer, engine's error); `then` is done once an answer has `after` tokens."""
    found, done = {}, []

    def tell(reply):
        before = found.get(reply["index"], {"output_ids": []})["output_ids"]
        assert reply["output_ids"][: len(before)] == before, "what was told is taken back"
        found[reply["index"]] = reply
        if then is not None and not done and len(reply["output_ids"]) >= after:
            done.append(then())

    async def scene():
        try:
            await pool.generate_stream(request, tell)
        except EnginesLostError as error:
            return error
        return None

    return found, scene()


def test_an_engine_killed_in_mid_answer_is_continued_by_another(pool, publish):
    pair = pool(2)
    publish(pair, 7)
    request = group([3] * 4, 200)
    for i, params in enumerate(request["sampling_params"]):
        params["sampling_seed"] = i
    expected = pair.aio.run(pair.pool.generate(request))
    killed = []

    def kill():
        busy = [i for i, load in enumerate(pair.pool._load) if load]
        assert len(busy) == 1, "a group stays together"
        pair.engines[busy[0]].kill()
        killed.append(busy[0])

    found, scene = listen(pair.pool, request, after=40, then=kill)
    assert pair.aio.run(scene) is None and len(killed) == 1
    for i, whole in enumerate(expected):
        reply = found[i]
        assert reply["pieces"] == 2, "the answer was begun anew"
        assert said(reply)[0] == said(whole)[0]
        assert said(reply)[1] == pytest.approx(said(whole)[1], abs=1e-4)
        assert reply["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]
        assert reply["meta_info"]["completion_tokens"] == 200
    pair.settle()


def test_a_client_without_a_pool_goes_on_after_a_broken_connection(pool):
    one = pool(1)
    url = one.engines[0].url
    request = group([5], 60)
    expected = one.aio.run(one.pool.generate(request))

    async def relay():
        """Passes on what the engine says, and breaks the first connection in the middle."""
        seen = []

        async def handle(reader, writer):
            seen.append(1)
            host, port = url.removeprefix("http://").split(":")
            up_reader, up_writer = await asyncio.open_connection(host, int(port))

            async def forward():
                while data := await reader.read(65536):
                    up_writer.write(data)

            task = asyncio.ensure_future(forward())
            total = 0
            while data := await up_reader.read(4096):
                writer.write(data)
                total += len(data)
                if len(seen) == 1 and total > 20_000:
                    break
            task.cancel()
            writer.close()
            up_writer.close()

        return await asyncio.start_server(handle, "127.0.0.1", 0), seen

    async def scene():
        server, seen = await relay()
        client = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=20, retries=1)
        found = {}
        await client.generate_stream(request, lambda r: found.update({r["index"]: r}))
        await client.close()
        server.close()
        return found[0], len(seen)

    reply, connections = one.aio.run(scene())
    assert connections == 2 and reply["pieces"] == 2
    assert said(reply)[0] == said(expected[0])[0]
    assert reply["meta_info"]["finish_reason"]["type"] == "length"


def test_where_the_run_is_to_end_with_an_engine_it_does(pool, publish):
    one = pool(1, restart=False)
    publish(one, 1)
    found, scene = listen(one.pool, group([1], 200), after=20, then=lambda: one.engines[0].kill())
    error = one.aio.run(scene)
    assert isinstance(error, EnginesLostError) and 20 <= len(found[0]["output_ids"]) < 200
