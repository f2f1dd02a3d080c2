"""The front address of `slime serve`: who may reach it, and how much one request may bring."""

import asyncio

import aiohttp
import pytest

from slimecli.engines.embedded.server import Listener, body, reply, web_app
from slimecli.ports import url_at
from slimecli.serving.front import MAX_BODY, proxied, warn_if_open


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("0.0.0.0", "k", False),
    ],
)
def test_an_open_address_without_a_key_is_warned_of(host, key, warned, capsys):
    warn_if_open(host, key)
    assert ("--api-key-env" in capsys.readouterr().err) == warned


def test_while_no_engine_is_there_questions_are_told_so():
    class Empty:
        urls: list[str] = []
        key = ""
        text = None

    async def work():
        routes = [route for route in proxied(Empty()) if route[1] == "/server_info"]
        listener = Listener(web_app(routes))
        url = await listener.start()
        async with aiohttp.ClientSession() as session, session.get(url + "/server_info") as answer:
            found = answer.status, await answer.json()
        await listener.stop()
        return found

    status, told = asyncio.run(work())
    assert status == 503 and "no engine is there" in told["error"]["message"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_address_that_is_told_can_be_asked(host, url):
    assert url_at(host, 80) == url


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_beyond_the_limit_is_refused_and_the_next_one_answered(chunked):
    async def echo(request):
        return reply(await body(request))

    async def parts(size):
        yield b'{"a": "' + b"x" * size + b'"}'

    async def work():
        listener = Listener(web_app([("POST", "/echo", echo)], max_body=1000))
        url = await listener.start()
        async with aiohttp.ClientSession() as session:
            found = []
            for size in (5000, 10):
                data = parts(size) if chunked else b"".join([part async for part in parts(size)])
                async with session.post(url + "/echo", data=data) as answer:
                    found.append((answer.status, await answer.json()))
        await listener.stop()
        return found

    (refused, told), (status, answer) = asyncio.run(work())
    assert refused == 413 and "Too Large" in told["error"]["message"]
    assert (status, answer) == (200, {"a": "x" * 10})
    assert MAX_BODY == 256 << 20
