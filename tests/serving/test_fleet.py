"""Engines that die behind `slime serve`: each is replaced in its own place, and the others answer meanwhile."""

import asyncio

import pytest
from aiohttp import web

from slimecli.agents.text_engine import HttpStream
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import Listener, start_server_thread, web_app
from slimecli.engines.http import HttpEngine
from slimecli.engines.pool import EnginePool
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.recipe import load_recipe
from slimecli.serving import fleet as serving
from slimecli.serving.fleet import ProcessFleet
from tests.models import tiny_model

ASK = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}


class Threaded:
    """A worker in this process. `troubles` are raised by the next ones that start."""

    started: list[tuple[str, str]] = []
    troubles: list[Exception] = []

    def __init__(self, recipe, model_dir, log, device="auto", *, key=""):
        Threaded.started.append((log.name, device))
        if Threaded.troubles:
            raise Threaded.troubles.pop()
        self.url, self._stop = start_server_thread(EmbeddedEngine(model_dir, slots=2, max_context=64))
        self._lives = True

    def alive(self):
        return self._lives

    def close(self):
        self._lives = False
        self._stop()


class Router:
    """Hands everything to the first engine that it was told of."""

    def __init__(self, recipe, urls, **more):
        self.urls, self.url = list(urls), urls[-1]

    def add(self, url):
        self.urls.append(url)

    def remove(self, url):
        self.urls.remove(url)

    def close(self):
        pass


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens a fleet, runs a scene with it while it is watched over, and closes it."""
    monkeypatch.setattr(serving, "EmbeddedWorker", Threaded)
    monkeypatch.setattr(serving, "start_router", Router)
    monkeypatch.setattr(serving, "WATCH_S", 0.02)
    monkeypatch.setattr(serving, "gpus", lambda: 2)
    monkeypatch.setattr(Threaded, "started", [])
    monkeypatch.setattr(Threaded, "troubles", [])
    model = tiny_model(tmp_path / "model")

    def run(scene, *sets):
        async def work():
            fleet = ProcessFleet(load_recipe(overrides=("rollout.max_retries=0", *sets)), model, tmp_path / "logs")
            watching = asyncio.ensure_future(fleet.watch())
            try:
                return await asyncio.wait_for(scene(fleet, watching, model), 60)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await fleet.close()

        return asyncio.run(work())

    return run


async def replaced(fleet, number):
    """Kill an engine and wait for the one in its place."""
    dead = fleet._workers[number]
    await asyncio.to_thread(dead.close)
    while fleet._workers.get(number) in (None, dead):
        await asyncio.sleep(0.01)


def test_an_engine_without_a_router_is_found_at_its_new_address(opened):
    async def scene(fleet, watching, model):
        await replaced(fleet, 0)
        whole = await fleet.text.generate(ASK)
        return whole[0], [item async for item in fleet.text.stream(ASK)][-1]

    for reply in opened(scene, "engine.replicas=1", "engine.router='none'"):
        assert reply["meta_info"]["completion_tokens"] == 3


def test_each_engine_is_replaced_in_its_own_place(opened):
    async def scene(fleet, watching, model):
        await replaced(fleet, 0)
        await replaced(fleet, 1)
        assert sorted(fleet._router.urls) == sorted(fleet.urls)

    opened(scene, "engine.replicas=2", "engine.router='builtin'")
    first, second = ("engine_0.log", "cuda:0"), ("engine_1.log", "cuda:1")
    assert Threaded.started == [first, second, first, second]


def test_a_replacement_that_fails_costs_a_try_and_no_answer(opened, capsys):
    async def scene(fleet, watching, model):
        await fleet.update(WeightUpdate(kind="disk", version=7, folder=model))
        Threaded.troubles.append(SlimeError("no memory for it"))
        await replaced(fleet, 0)
        assert not watching.done() and len(fleet.urls) == 2
        return [await client.info() for client in fleet._clients.values()]

    assert [info["weight_version"] for info in opened(scene, "engine.replicas=2", "engine.router='builtin'")] == [
        "7"
    ] * 2
    assert "engine 0 cannot be replaced: no memory for it" in capsys.readouterr().err


def test_when_all_tries_are_spent_it_is_over(opened):
    async def scene(fleet, watching, model):
        Threaded.troubles.extend([SlimeError("no memory")] * 9)
        for worker in list(fleet._workers.values()):
            await asyncio.to_thread(worker.close)
        with pytest.raises(SlimeError, match="no engine is left"):
            await watching

    opened(scene, "engine.replicas=2", "engine.router='builtin'", "engine.max_restarts=2")
    assert len(Threaded.started) == 2 + 4


@pytest.mark.parametrize("how", ["whole", "streamed", "by a pool", "streamed by a pool"])
def test_a_conversation_is_told_to_routers_in_the_header_that_all_of_them_read(tmp_path, how):
    seen = []

    async def generate(request):
        seen.append((request.headers.get("X-SMG-Routing-Key"), "routing_key" in await request.json()))
        return web.Response(body=b"{}", content_type="application/json", status=400)

    async def work():
        listener = Listener(web_app([("POST", "/generate", generate)]))
        url = await listener.start()
        client = HttpEngine(url, timeout_s=10)
        with pytest.raises(SlimeError):
            engine = EnginePool([client]) if "pool" in how else client
            if how == "streamed by a pool":
                many = {"input_ids": [ASK["input_ids"]], "sampling_params": [ASK["sampling_params"]]}
                await engine.generate_stream({**many, "routing_key": "anna"}, print)
            elif how == "streamed":
                await anext(HttpStream(client)({**ASK, "routing_key": "anna"}))
            else:
                await engine.generate({**ASK, "routing_key": "anna"})
        await client.close()
        await listener.stop()

    asyncio.run(work())
    assert seen == [("anna", False)]
