"""Routers as processes, in front of real engines as processes."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from slimecli.engines.router import start_router
from slimecli.engines.router.programs import find
from slimecli.recipe import load_recipe
from tests.engines.processes import Stock
from tests.models import tiny_model


@pytest.fixture(scope="package")
def stock(tmp_path_factory):
    """Engines that the tests share."""
    stock = Stock(tiny_model(tmp_path_factory.mktemp("model")))
    yield stock
    stock.close()


@pytest.fixture
def engines(stock):
    """Take so many living engines."""
    return stock.take


@pytest.fixture
def router(tmp_path):
    """Start a router in front of engines."""
    made = []

    def start(engines, name="builtin", api_key="", on_death=None, restarts=0, **arguments):
        if find(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
        given = tuple(f"router.{k}={v!r}" for k, v in arguments.items())
        sets = (f"engine.router={name!r}", f"engine.max_restarts={restarts}", "engine.start_timeout_s=30", *given)
        recipe = load_recipe("", sets)
        log = tmp_path / f"router-{len(made)}.log"
        urls = [getattr(e, "url", e) for e in engines]
        made.append(start_router(recipe, urls, host="127.0.0.1", port=0, log=log, api_key=api_key, on_death=on_death))
        return made[-1]

    yield start
    for one in made:
        one.close()


async def post(session, url, data, headers=None):
    async with session.post(url, json=data, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.fixture
def ask():
    """Send payloads to an address at the same time; the (status, reply) of each."""

    def send(url, payloads, path="/generate", headers=None, meanwhile=None):
        async def scene():
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                calls = [asyncio.ensure_future(post(session, url + path, p, headers)) for p in payloads]
                if meanwhile is not None:
                    await meanwhile()
                return await asyncio.gather(*calls)

        return asyncio.run(scene())

    return send
