"""What goes wrong in a sync is named: the weight that was damaged, the engine that died or was late, the full disk."""

import asyncio
import json
import multiprocessing
import time

import pytest
import torch

from slimecli import files
from slimecli.engines import connect
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.recipe import load_recipe
from slimecli.sync import chain
from slimecli.sync.push import push, push_each
from slimecli.sync.stage import stage_weights
from slimecli.weights.hf import HfFolder
from tests.engines.processes import start_engine
from tests.forked import SERVER
from tests.models import tiny_model

WEIGHT = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return tiny_model(root / "old", seed=0), tiny_model(root / "new", seed=1)


@pytest.fixture
def engine(models):
    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    yield client
    asyncio.run(client.close())
    stop()


def stage(kind, model, folder, version=1):
    return stage_weights(HfFolder(model).iterate(), kind, version=version, folder=folder, like=model)


def flip(path, place):
    """One bit of a file."""
    with path.open("r+b") as handle:
        handle.seek(place)
        byte = handle.read(1)[0]
        handle.seek(place)
        handle.write(bytes([byte ^ 4]))


def in_buffer(staged):
    told = files.read_json(staged.update.manifest)
    entry = next(e for e in told["tensors"] if e["name"] == WEIGHT)
    flip(staged.update.manifest.with_suffix(".bin"), entry["offset"] + 6)


def in_folder(staged):
    entry = HfFolder(staged.update.folder).entries[WEIGHT]
    flip(entry.file, entry.offset + 6)


@pytest.mark.parametrize(("kind", "damage"), [("shared_memory", in_buffer), ("tensor", in_buffer), ("disk", in_folder)])
def test_one_bit_in_one_weight_is_named(kind, damage, engine, models, tmp_path):
    staged = stage(kind, models[1], tmp_path / "w")
    damage(staged)
    with pytest.raises(SlimeError) as caught:
        asyncio.run(push(engine, staged, 30))
    assert f"1 of {len(staged.digests)} weights differ: {WEIGHT}" in caught.value.what
    assert f"engine 0 at {engine.url}" in caught.value.what


def test_one_bit_in_process_is_named(models, tmp_path):
    staged = stage("in_process", models[1], tmp_path)
    staged.update.tensors[WEIGHT].view(-1).view(torch.int32)[3] ^= 1
    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    with pytest.raises(SlimeError, match=f"1 of .* weights differ: {WEIGHT}"):
        asyncio.run(push(own, staged, 30))
    asyncio.run(own.close())


def _trainer(connection, model, folder):
    """Offers weights, one of which changes after it was described."""
    pairs = dict(HfFolder(model).iterate())
    staged = stage_weights(iter(pairs.items()), "distributed", version=1, folder=folder, like=model, one_host=True)
    pairs[WEIGHT].view(-1).view(torch.int32)[3] ^= 1
    connection.send(staged)
    connection.recv()


def test_one_bit_over_a_process_group_is_named(engine, models, tmp_path):
    here, there = multiprocessing.Pipe()
    process = SERVER.Process(target=_trainer, args=(there, models[1], tmp_path), daemon=True)
    process.start()
    with pytest.raises(SlimeError, match=f"1 of .* weights differ: {WEIGHT}"):
        asyncio.run(push(engine, here.recv(), 30))
    here.send("end")
    process.join(20)
    assert process.exitcode == 0


@pytest.fixture
def changes(engine, models, tmp_path):
    """The engine at version 0 of a chain, version 1 staged as changes."""
    folder = tmp_path / "chain"
    asyncio.run(push(engine, stage("disk_delta", models[0], folder, 0), 30))
    staged = stage("disk_delta", models[1], folder, 1)
    yield staged, folder / "d000001"
    chain.forget(folder)


def test_one_bit_in_changes_is_named_and_nothing_is_applied(changes, engine):
    staged, folder = changes
    entry = files.read_json(folder / "delta.json")["tensors"][WEIGHT]
    flip(folder / "delta.bin", entry["offset"] + entry["nbytes"] // 2)
    before = asyncio.run(engine.fingerprint())
    with pytest.raises(SlimeError, match=WEIGHT):
        asyncio.run(push(engine, staged, 30))
    assert asyncio.run(engine.fingerprint()) == before, "verified before anything is written"
    said = asyncio.run(engine.generate({"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}))
    assert said["meta_info"]["weight_version"] == "0"


def test_changes_that_are_cut_short(changes, engine):
    staged, folder = changes
    path = folder / "delta.bin"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SlimeError, match=r"delta\.bin is cut short: 100 of"):
        asyncio.run(push(engine, staged, 30))


def call_changes(engine, folder, version):
    payload = {"changes": str(folder), "weight_version": str(version)}
    return asyncio.run(engine.call("POST", "/update_weights_from_chain", payload, "being tested"))


def test_changes_twice_and_on_other_weights(changes, engine, models, tmp_path):
    staged, folder = changes
    answer = call_changes(engine, folder, 1)
    assert answer["fingerprint"] == staged.fingerprint and answer["how"] == "changes"
    assert answer["bytes"] == (folder / "delta.bin").stat().st_size
    with pytest.raises(SlimeError, match="changes to version 1 are applied already"):
        call_changes(engine, folder, 1)
    assert asyncio.run(engine.fingerprint()) == staged.fingerprint
    third = tiny_model(tmp_path / "third", seed=3)
    asyncio.run(push(engine, stage("disk", third, tmp_path / "d", 5), 30))
    with pytest.raises(SlimeError, match="changes to version 1 are from version 0"):
        call_changes(engine, folder, 1)


def test_who_cannot_follow_the_chain_takes_all(changes, engine, models):
    staged, _ = changes
    fresh = EmbeddedEngine(models[1], slots=2, max_context=64)
    other = EmbeddedEngine(tiny_model(models[0].parent / "third", seed=3), slots=2, max_context=64)
    receipts = asyncio.run(push([engine, fresh, other], staged, 30))
    assert [r.how for r in receipts] == ["changes", "none", "full+changes"]
    assert {r.fingerprint for r in receipts} == {staged.fingerprint} and {r.version for r in receipts} == {1}
    for own in (fresh, other):
        asyncio.run(own.close())


def test_a_frozen_engine_is_late_and_a_killed_one_is_gone(models, tmp_path):
    served = [start_engine(models[0]) for _ in range(2)]
    clients = [HttpEngine(e.url, timeout_s=20) for e in served]
    staged = stage("shared_memory", models[1], tmp_path)

    async def scene():
        for client in clients:
            await client.health()
        served[1].freeze()
        late = await push_each(clients, staged, 0.7)
        asyncio.get_running_loop().call_later(0.4, served[1].kill)
        gone = await push_each(clients, staged, 20)
        held = await clients[0].fingerprint()
        for client in clients:
            await client.close()
        return late, gone, held

    begin = time.monotonic()
    late, gone, held = asyncio.run(scene())
    served[0].kill()
    assert held == staged.fingerprint and [o.trouble for o in (late[0], gone[0])] == ["", ""]
    assert late[1].trouble == "no answer within 0.7 s" and late[1].receipt is None
    assert "no connection to the engine" in gone[1].trouble and gone[1].name == f"engine 1 at {served[1].url}"
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("kind", ["disk", "disk_delta"])
def test_a_full_disk_is_named_and_nothing_is_left(kind, models, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slimecli.weights.hf._ShardWriter.add", full)
    with pytest.raises(SlimeError, match=f"disk full while writing {tmp_path}"):
        stage(kind, models[1], tmp_path / "w")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert stage(kind, models[1], tmp_path / "w").fingerprint


def test_outcomes_are_ready_to_be_decided_on(models, tmp_path):
    """What a supervisor needs: who, what it answered, why it must go."""

    class Refusing:
        url = "http://127.0.0.1:1"

        async def update_weights(self, update):
            raise SlimeError("out of memory")

    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    staged = stage("shared_memory", models[1], tmp_path)

    async def scene():
        first = await push_each([own, Refusing()], staged, 20)
        again = await push_each([own], staged, 20)
        await own.close()
        return first, again

    (good, bad), again = asyncio.run(scene())
    assert good.trouble == "" and good.receipt.fingerprint == staged.fingerprint
    assert (bad.index, bad.name, bad.receipt, bad.trouble) == (
        1, "engine 1 at http://127.0.0.1:1", None, "out of memory"
    )  # fmt: skip
    assert again[0].trouble == "", "the same staged weights serve an engine that was replaced"
    assert json.dumps(again[0].receipt.fingerprint)


def test_an_update_that_somebody_left_in_the_middle_is_named(engine, models, tmp_path):
    """Its engine takes weights, has no fingerprint of them yet, and answers nobody."""
    asyncio.run(engine.call("POST", "/begin_weight_update", {}, "beginning"))
    staged = stage("disk", models[1], tmp_path / "w")
    with pytest.raises(SlimeError, match="in the middle of an update in parts that somebody else began") as caught:
        asyncio.run(push(engine, staged, 30))
    assert engine.url in caught.value.what
    asyncio.run(engine.call("POST", "/end_weight_update", {}, "ending"))
    assert asyncio.run(push(engine, staged, 30))[0].fingerprint == staged.fingerprint


def test_an_update_in_parts_that_is_late_is_ended_on_the_engine(models):
    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)

    async def never(*_):
        await asyncio.sleep(600)

    own.weights.from_group = never

    async def scene():
        update = WeightUpdate(kind="distributed", version=1, group={"names": [], "dtypes": [], "shapes": []})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.update_weights(update), 1)
        end = time.monotonic() + 10
        while own.weights.updating:
            assert time.monotonic() < end, "it stands still for ever"
            await asyncio.sleep(0.02)
        assert (await client.generate({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}))["output_ids"]
        await client.close()

    asyncio.run(scene())
    stop()


def test_an_update_may_take_longer_than_an_answer(models, tmp_path):
    own = EmbeddedEngine(models[0], slots=2, max_context=64)
    url, stop = start_server_thread(own)
    client = connect(load_recipe("", ("rollout.request_timeout_s=0.5", "sync.timeout_s=20")), url)
    take = own.weights.from_folder

    async def slowly(*words):
        await asyncio.sleep(1.5)
        return await take(*words)

    own.weights.from_folder = slowly
    staged = stage("disk", models[1], tmp_path / "w")
    assert asyncio.run(push(client, staged, 20))[0].fingerprint == staged.fingerprint
    asyncio.run(client.close())
    stop()
