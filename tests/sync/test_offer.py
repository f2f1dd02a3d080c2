"""A weight offer listens where its engines are, and nowhere else."""

import asyncio
import datetime
import multiprocessing
import socket
import threading
import time

import pytest
import torch

from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.engines.sglang.proof import Checksums
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.sync import distributed
from slimecli.sync.push import push_each
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt
from tests.forked import SERVER


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


# -- proofs of servers that have no fingerprint ------------------------------------------------------------------------

PROJECTION = "model.layers.0.self_attn.o_proj.weight"


class Server:
    """What SGLang says of itself, spread over so many ranks."""

    def __init__(self, held, ranks=1, trouble=None):
        self.url, self.trouble = f"http://{ranks}", trouble
        self.sums = Checksums(ranks=ranks)
        for name, tensor in held.items():
            self.sums.update(name, tensor)

    async def call(self, method, path, payload, doing):
        if self.trouble:
            raise self.trouble
        return {
            "/server_info": {"dtype": "auto", "device": "cpu"},
            "/model_info": {"weight_version": "default"},
            "/weights_checker": {"ranks": [{"checksums": rank} for rank in self.sums.ranks]},
        }[path]


@pytest.fixture
def compared():
    """Have servers compared with weights that a trainer's thread holds; one outcome each."""

    def go(weights, *servers, timeout_s=20.0, trainer=distributed._tell_checksums):
        limit = datetime.timedelta(seconds=1)
        store = distributed.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        ours = distributed.TCPStore("127.0.0.1", store.port, None, False, limit)
        thread = threading.Thread(target=trainer, args=(store, weights))
        thread.start()
        receipts = [WeightReceipt(version=3, fingerprint="", seconds=0.0, bytes_=0)] * len(servers)
        staged = StagedWeights(
            update=WeightUpdate(kind="distributed", version=3), fingerprint="f", digests={}, bytes_=0, seconds=0.0
        )
        try:
            return asyncio.run(distributed._compared(servers, receipts, staged, ours, timeout_s))
        finally:
            thread.join(10)

    return go


@pytest.fixture
def weights():
    return {PROJECTION: torch.arange(32, dtype=torch.float32).view(4, 8)}


def test_servers_of_different_size_are_compared_each_with_its_shares(compared, weights):
    other = {PROJECTION: weights[PROJECTION] + 1}
    one, two, wrong = compared(weights, Server(weights), Server(weights, ranks=2), Server(other, ranks=2))
    assert (one.fingerprint, two.fingerprint) == ("f", "f") and one.version == -1, "`default` is no version"
    assert isinstance(wrong, SlimeError) and f"{PROJECTION} of rank 0" in wrong.what


def test_a_server_that_dies_before_its_proof_is_the_outcome_of_this_one(compared, weights):
    dead = EngineUnreachableError("it is gone", "")
    good, bad = compared(weights, Server(weights), Server(weights, trouble=dead))
    assert good.fingerprint == "f" and bad is dead


def test_checksums_may_take_longer_than_a_call_to_the_store(compared, weights, monkeypatch):
    server, update = Server(weights), Checksums.update
    monkeypatch.setattr(Checksums, "update", lambda *args: (time.sleep(1.5), update(*args)))
    assert compared(weights, server)[0].fingerprint == "f"


def test_a_trainer_without_checksums_is_named(compared, weights):
    def fails(store, weights):
        store.set("trouble", "out of memory")

    with pytest.raises(SlimeError, match="could not compute checksums of its weights: out of memory"):
        compared(weights, Server(weights), trainer=fails)
    with pytest.raises(SlimeError, match="no checksums of its weights after 0.2 s"):
        compared(weights, Server(weights), trainer=lambda store, weights: None, timeout_s=0.2)


def _mortal(connection):
    """A trainer that ends when it is told to."""
    connection.send(distributed.offer({"w": torch.ones(2)}, 3, one_host=True))
    connection.recv()


def test_a_trainer_that_dies_while_it_offers_is_named():
    here, there = multiprocessing.Pipe()
    process = SERVER.Process(target=_mortal, args=(there,), daemon=True)
    process.start()
    described = here.recv()

    class Engine:
        async def ranks(self):
            process.kill()
            process.join()
            return 1

        async def join_group(self, payload):
            return None

        async def update_weights(self, update):
            return WeightReceipt(version=3, fingerprint="", seconds=0.0, bytes_=0)

        async def leave_group(self, name):
            return None

    update = WeightUpdate(kind="distributed", version=3, group=described)
    staged = StagedWeights(update=update, fingerprint="f", digests={}, bytes_=0, seconds=0.0)
    with pytest.raises(SlimeError, match="the trainer's offer at 127.0.0.1 is gone") as caught:
        asyncio.run(push_each([Engine()], staged, 10))
    assert "--resume" in caught.value.fix
