"""Trainer and engines on one device: who sleeps and wakes when, and in which order."""

import asyncio
import contextlib

import pytest

from slimecli.cluster.turns import Turns


class Device:
    """Trainer and engine at once; keeps what they were told."""

    def __init__(self):
        self.told = []
        self.engine = Engine(self.told)

    def sleep(self):
        self.told.append("trainer sleeps")

    def wake(self):
        self.told.append("trainer wakes")


class Engine:
    def __init__(self, told):
        self.told = told

    async def sleep(self, tags):
        self.told.append(f"engines give up {'+'.join(tags)}")

    async def wake(self, tags):
        self.told.append(f"engines take {'+'.join(tags)}")


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def turns(device):
    return Turns(device, device.engine, asyncio.run, contextlib.nullcontext)


def test_a_step_as_the_loop_takes_it(device, turns):
    """Opened with the engines awake and the trainer at rest; nobody comes before the others have left."""
    turns.take("share")
    turns.take("generate")
    assert device.told == ["engines give up kv_cache", "trainer wakes", "trainer sleeps", "engines take kv_cache"]
    device.told.clear()
    for phase in ("generate", "learn", "share", "generate"):
        turns.take(phase)
    assert device.told == [
        *("engines give up weights+kv_cache", "trainer wakes"),
        "engines take weights",
        *("trainer sleeps", "engines take kv_cache"),
    ]


def test_a_phase_that_is_there_costs_nothing(device, turns):
    turns.take("learn")
    device.told.clear()
    turns.take("learn")
    assert device.told == []


def test_a_checkpoint_keeps_the_engines_weights(device, turns):
    turns.take("generate")
    turns.take("share")
    assert "weights" not in " ".join(device.told), "they are not published again before the next answers"
