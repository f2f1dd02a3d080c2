"""Every way of moving weights puts the same bits into the real engine, alone and over HTTP."""

import asyncio
import multiprocessing
from pathlib import Path

import pytest

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError
from slimecli.sync.push import push
from slimecli.sync.stage import StagedWeights, stage_weights
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.forked import SERVER
from tests.models import tiny_model

KINDS = ("in_process", "shared_memory", "tensor", "disk", "disk_delta", "distributed")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return tiny_model(root / "old", seed=0), tiny_model(root / "new", seed=1)


def _stage(kind: str, model: Path, folder: Path) -> StagedWeights:
    return stage_weights(HfFolder(model).iterate(), kind, version=7, folder=folder, like=model)


def _trainer(connection, model: Path, folder: Path) -> None:
    """A trainer's process: it stages, tells, and lives on until it is told to end."""
    connection.send(_stage("distributed", model, folder))
    connection.recv()


@pytest.fixture
def staged_by(tmp_path):
    """kind, model -> StagedWeights; `distributed` from another process, as its sender must be."""
    ends = []

    def make(kind: str, model: Path) -> StagedWeights:
        if kind != "distributed":
            return _stage(kind, model, tmp_path / "staged")
        here, there = multiprocessing.Pipe()
        process = SERVER.Process(target=_trainer, args=(there, model, tmp_path / "staged"), daemon=True)
        process.start()
        ends.append((here, process))
        return here.recv()

    yield make
    for here, process in ends:
        here.send("end")
        process.join(20)
        assert process.exitcode == 0


@pytest.fixture(params=["in_process", "http"])
def engine(request, models):
    """The engine with the old weights, through each of its doors."""
    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    if request.param == "in_process":
        yield own
        asyncio.run(own.close())
        return
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    yield client
    asyncio.run(client.close())
    stop()


async def _push_to(engine, staged, timeout_s=30):
    return await push([engine], staged, timeout_s), await engine.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_holds_the_trainers_bits(kind, engine, models, staged_by):
    if kind == "in_process" and isinstance(engine, HttpEngine):
        with pytest.raises(SlimeError, match="cannot go in_process"):
            asyncio.run(_push_to(engine, staged_by(kind, models[1])))
        return
    staged = staged_by(kind, models[1])
    receipts, held = asyncio.run(_push_to(engine, staged))
    assert held == staged.fingerprint == fingerprint(HfFolder(models[1]).iterate())
    assert receipts[0].version == 7 and receipts[0].bytes_ == HfFolder(models[1]).nbytes


@pytest.mark.parametrize("kind", ["shared_memory", "tensor", "disk", "disk_delta", "distributed"])
def test_weights_of_another_shape_are_refused_and_the_trainer_is_free(kind, engine, staged_by, tmp_path):
    wrong = tiny_model(tmp_path / "wrong", hidden_size=32)
    staged = staged_by(kind, wrong)
    before = asyncio.run(engine.fingerprint())
    with pytest.raises(SlimeError, match=r"engine 0.*refused.*shape"):
        asyncio.run(_push_to(engine, staged))
    assert asyncio.run(engine.fingerprint()) == before
