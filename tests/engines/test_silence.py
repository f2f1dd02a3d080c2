"""An engine that says nothing for long: named when it is stuck, left in peace when it is only slow."""

import asyncio
import contextlib
import multiprocessing
import socket

import pytest
from aiohttp import web

from slimecli.engines import http
from slimecli.errors import SlimeError
from slimecli.shim import http as shim_http


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http, "SILENCE_S", 0.1)
    monkeypatch.setattr(http, "PROBE_S", 0.1)


async def ask(url, timeout_s, count=2):
    engine = http.HttpEngine(url, timeout_s=timeout_s)
    try:
        return await asyncio.gather(*(engine.generate({}) for _ in range(count)), return_exceptions=True)
    finally:
        await engine.close()


def test_a_stopped_engine_is_named_while_it_is_waited_for(capsys):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as stopped:  # the kernel accepts, nobody answers
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        answers = asyncio.run(ask(url, 0.5, count=10))
    assert [type(a) for a in answers] == [SlimeError] * 10
    told = capsys.readouterr().err
    assert f"for the engine at {url} while generating" in told and "giving up after 0.5 s" in told
    assert 1 <= told.count("health check") <= 5, "every 0.1 s one of the requests asks, not each of the ten"


def test_a_slow_engine_is_left_in_peace(capsys):
    asked = []

    async def slow(request):
        await asyncio.sleep(0.4)
        return web.json_response([{"ok": 1}])

    async def health(request):
        asked.append(1)
        return web.Response()

    async def scene():
        app = web.Application()
        app.add_routes([web.post("/generate", slow), web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await ask(f"http://127.0.0.1:{port}", 5)
        finally:
            await runner.cleanup()

    assert asyncio.run(scene()) == [[{"ok": 1}], [{"ok": 1}]]
    assert asked and capsys.readouterr().err == ""


@pytest.mark.parametrize("loop", [http.client_loop, shim_http._loop])
def test_a_forked_process_has_a_loop_that_turns(loop):
    async def turn():
        return 7

    def answer():
        return asyncio.run_coroutine_threadsafe(turn(), loop()).result(10)

    assert answer() == 7
    child = multiprocessing.get_context("fork").Process(target=answer)
    child.start()
    child.join(20)
    assert child.exitcode == 0
