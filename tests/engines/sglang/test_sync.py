"""Every kind of sync through one client into the embedded engine and into a real SGLang server."""

import asyncio
import json

import pytest

from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError
from slimecli.sync import chain
from slimecli.sync.push import push
from slimecli.sync.stage import stage_weights
from slimecli.weights.hf import HfFolder
from tests.engines.sglang.conftest import until_busy

ANSWER = 300
PATIENCE_S = 180
PARAMS = {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 1}
GREEDY = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


@pytest.fixture
def client(served, models, tmp_path):
    """Whatever a test does, the next one finds the weights of seed 0."""
    yield served
    asyncio.run(push(served, stage("disk", models("qwen3"), tmp_path / "back", 0), PATIENCE_S))
    chain.forget(tmp_path / "w")


def stage(kind, model, folder, version):
    return stage_weights(HfFolder(model).iterate(), kind, version=version, folder=folder, like=model)


def said(client):
    return asyncio.run(client.generate(GREEDY))["output_ids"]


@pytest.mark.parametrize("kind", ["shared_memory", "tensor", "disk", "disk_delta"])
def test_weights_arrive_and_are_proven(client, models, tmp_path, kind):
    before = said(client)
    for version, seed in ((1, 1), (2, 0), (3, 1)):
        staged = stage(kind, models("qwen3", seed=seed), tmp_path / "w", version)
        receipt = asyncio.run(push(client, staged, PATIENCE_S))[0]
        assert (receipt.version, receipt.fingerprint) == (version, staged.fingerprint)
        assert (said(client) == before) == (seed == 0)
        assert 0 < receipt.pause_seconds <= receipt.seconds


def test_one_bit_in_shared_memory_is_found(client, models, tmp_path):
    staged = stage("tensor", models("qwen3", seed=1), tmp_path / "w", 1)
    told = json.loads(staged.update.manifest.read_text())
    entry = next(e for e in told["tensors"] if e["name"].endswith("layers.1.self_attn.o_proj.weight"))
    with staged.update.manifest.with_suffix(".bin").open("r+b") as handle:
        handle.seek(entry["offset"])
        byte = handle.read(1)[0]
        handle.seek(entry["offset"])
        handle.write(bytes([byte ^ 1]))
    with pytest.raises(SlimeError, match=staged.fingerprint):
        asyncio.run(push(client, staged, PATIENCE_S))


async def during(client, staged, running):
    """Four requests under way when weights change, and one after."""
    early = [
        asyncio.create_task(client.generate({"input_ids": [i, 9], "sampling_params": PARAMS})) for i in (3, 4, 5, 6)
    ]
    await until_busy(client, 1, *early)
    await push(client, staged, PATIENCE_S, running=running)
    replies = [await task for task in early]
    return [reply["meta_info"] for reply in replies], (await client.generate(GREEDY))["meta_info"]


@pytest.mark.parametrize("running", ["finish", "abort", "continue"])
def test_requests_under_way(client, models, tmp_path, running):
    staged = stage("tensor", models("qwen3", seed=1), tmp_path / "w", 7)
    metas, later = asyncio.run(during(client, staged, running))
    ends = {meta["finish_reason"]["type"] for meta in metas}
    assert later["weight_version"] == "7"
    if running == "abort":
        assert "abort" in ends and all(meta["completion_tokens"] < ANSWER for meta in metas)
        return
    assert ends == {"length"} and {meta["completion_tokens"] for meta in metas} == {ANSWER}
    spoken = [[str(span["version"]) for span in meta["weight_versions"]] for meta in metas]
    if running == "finish":
        assert all(len(versions) == 1 for versions in spoken) and ["7"] not in spoken[:1], spoken
    else:
        assert any(len(versions) == 2 and versions[-1] == "7" for versions in spoken), spoken


def test_a_paused_server_is_left_paused(client, models, tmp_path):
    async def scene():
        await client.pause("retract")
        await push(client, stage("disk", models("qwen3", seed=1), tmp_path / "w", 2), PATIENCE_S)
        task = asyncio.create_task(client.generate(GREEDY))
        await asyncio.sleep(0.3)
        waits = not task.done()
        await client.resume()
        return waits, (await task)["meta_info"]["weight_version"]

    assert asyncio.run(scene()) == (True, "2")


def test_two_clients_of_one_chain(client, models, tmp_path):
    """They share the folder of all weights, which one of them brings forward."""
    other = HttpEngine(client.url, timeout_s=PATIENCE_S)
    for version, seed in ((1, 0), (2, 1)):
        staged = stage("disk_delta", models("qwen3", seed=seed), tmp_path / "w", version)
        asyncio.run(push(client, staged, PATIENCE_S))
        receipts = asyncio.run(push(other, staged, PATIENCE_S))
        assert receipts[0].fingerprint == staged.fingerprint
    asyncio.run(other.close())
