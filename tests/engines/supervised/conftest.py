"""A supervised pool over real engines in processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from slimecli.engines.http import HttpEngine
from slimecli.engines.seats import Policy
from slimecli.engines.supervisor import SupervisedPool
from slimecli.sync.delivery import Delivery
from slimecli.sync.stage import stage_weights
from slimecli.weights.hf import HfFolder
from tests.engines.processes import Stock, payload, start_engine
from tests.models import tiny_model

QUICK = Policy(interval_s=0.5, deadline_s=5, retries=2, start_timeout_s=20, sync_timeout_s=8, max_restarts=2)


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    """Two models of one shape; engines start on the first."""
    root = tmp_path_factory.mktemp("models")
    return [tiny_model(root / f"m{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="package")
def stock(folders):
    stock = Stock(folders[0])
    yield stock
    stock.close()


class Pool:
    """A SupervisedPool, its processes, and one loop for all that a test does with it."""

    def __init__(self, stock, count, policy):
        self.stock, self.aio = stock, asyncio.Runner()
        self.engines = stock.take(count)
        clients = [HttpEngine(e.url, timeout_s=30, retries=0) for e in self.engines]
        self.pool = SupervisedPool(clients, policy, self.respawn)
        self.counts = {}
        self.pool.count = lambda name, value: self.counts.update({name: self.counts.get(name, 0) + value})
        self.respawned = []
        self.trouble = None

    def respawn(self, number):
        if self.trouble is not None:
            raise self.trouble
        self.engines[number].kill()
        self.engines[number] = start_engine(self.stock.model)
        self.stock.adopt(self.engines[number])
        self.respawned.append(number)
        return HttpEngine(self.engines[number].url, timeout_s=30, retries=0)

    def ask(self, numbers, tokens=8, meanwhile=None):
        """Answers to numbered requests, sent at the same time."""

        async def scene():
            calls = [asyncio.ensure_future(self.pool.generate(payload(i, tokens))) for i in numbers]
            if meanwhile is not None:
                await meanwhile()
            return await asyncio.gather(*calls, return_exceptions=True)

        return self.aio.run(scene())

    def settle(self, seconds=20):
        """Wait until every engine takes part again."""

        async def wait():
            async with asyncio.timeout(seconds):
                while any(s.state != "up" for s in self.pool.seats):
                    await asyncio.sleep(0.02)

        self.aio.run(wait())

    def close(self):
        self.aio.run(self.pool.close())
        self.aio.close()


@pytest.fixture
def pool(stock):
    """Open a pool over so many engines."""
    made = []

    def open_pool(count=2, **changes):
        made.append(Pool(stock, count, dataclasses.replace(QUICK, **changes)))
        return made[-1]

    yield open_pool
    for one in made:
        one.close()


@pytest.fixture
def publish(folders, tmp_path):
    """Publish the weights of one of the models as a version."""

    def go(pool, version, model=1, kind="disk", stage=None):
        def stage_one(trainer, kind, version, folder, like):
            if stage is not None:
                stage(kind)
            return stage_weights(HfFolder(folders[model]).iterate(), kind, version=version, folder=folder, like=like)

        delivery = Delivery(stage_one, kind, tmp_path / "sync", folders[0], 20.0)
        return delivery.publish(None, pool.pool, version, pool.aio.run)

    return go
