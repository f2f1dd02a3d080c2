"""A weight offer listens where its engines are, and nowhere else."""

import asyncio
import socket

import pytest
import torch

from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.sync import distributed
from slimecli.sync.stage import StagedWeights


def reachable(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("one_host", [True, False])
def test_nothing_listens_beyond_what_was_asked_for(one_host):
    outside = distributed._own_address()
    own = "127.0.0.1" if one_host else outside
    described = distributed.offer({"w": torch.ones(2)}, 3, one_host=one_host)
    store = distributed._control(described)
    try:
        assert described["master_address"] == own
        ports = [described["control_port"], described["master_port"]]
        assert all(reachable(own, port) for port in ports)
        for other in {"127.0.0.1", "127.0.0.2", outside} - {own}:
            assert not any(reachable(other, port) for port in ports), other
    finally:
        store.set("world", "0")  # the thread ends


class Spread:
    """An engine of several processes, which tells how it is called into a group, and refuses."""

    def __init__(self, ranks):
        self.number, self.calls = ranks, []

    async def ranks(self):
        if not self.number:
            raise SlimeError("it is dead", "")
        return self.number

    async def join_group(self, payload):
        self.calls.append((payload["rank_offset"], payload["world_size"]))
        raise SlimeError("refused", "")

    async def leave_group(self, name):
        self.calls.append(name)


@pytest.fixture
def told(monkeypatch):
    """What the trainer would be told."""
    store = {}
    monkeypatch.setattr(
        distributed, "_control", lambda described: type("Store", (), {"set": lambda _, k, v: store.update({k: v})})()
    )
    return store


def pushed(*engines):
    group = {"master_address": "", "master_port": 1, "group_name": "g", "backend": "gloo"}
    update = WeightUpdate(kind="distributed", version=1, group=group)
    staged = StagedWeights(update=update, fingerprint="", digests={}, bytes_=0, seconds=0.0)
    return [e.what for e in asyncio.run(distributed.push(engines, staged, 10))]


def test_an_engine_over_several_processes_has_a_rank_for_each(told):
    engines = [Spread(n) for n in (2, 1, 4)]
    assert pushed(*engines) == ["refused"] * 3
    assert [e.calls for e in engines] == [[(1, 8), "g"], [(3, 8), "g"], [(4, 8), "g"]]
    assert told == {"world": "8", "go": "no"}


def test_nobody_joins_where_an_engine_does_not_tell_its_ranks(told):
    engines = [Spread(2), Spread(0)]
    assert pushed(*engines) == ["did not receive: another engine could not join the group", "it is dead"]
    assert not any(e.calls for e in engines) and told == {"world": "0"}
