"""Weights in parts, over a process group, and as bytes; what goes wrong with each."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.embedded.weights import Incoming
from slimecli.engines.http import EngineRefusedError, HttpEngine
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.sync import buckets, sglang_wire
from slimecli.weights.fingerprint import fingerprint

ASK = {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 6}}


@pytest.fixture
def served(models):
    own = EmbeddedEngine(models("llama"), slots=4, max_context=128)
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    yield client, load_file(models("llama", seed=1) / "model.safetensors"), own
    asyncio.run(client.close())
    stop()


TRAINER = """
import os, sys, torch
from safetensors.torch import load_file
from slimecli.engines.embedded.distributed import open_group
group = open_group(("127.0.0.1", int(sys.argv[1])), 0, 2, "push", "gloo")
for tensor in load_file(sys.argv[2]).values():
    torch.distributed.broadcast(tensor, src=0, group=group)
torch.distributed.destroy_process_group(group)
os._exit(0)
"""
"""rank 0, in a process of its own: torch allows one group of a name per process. It leaves by _exit, for gloo's threads
abort a process whose interpreter ends right after a group did."""


def post(client, path, **payload):
    return asyncio.run(client.call("POST", path, payload, "being tested"))


def as_parts(tensors, format_="safetensors"):
    raw = save(tensors) if format_ == "safetensors" else pickle.dumps(list(tensors.items()))
    return {"serialized_named_tensors": [base64.b64encode(raw).decode()], "load_format": format_}


def test_tensor_updates_come_in_parts_between_begin_and_end(served):
    client, tensors, _ = served
    names = list(tensors)
    with pytest.raises(EngineRefusedError, match="begin_weight_update") as error:
        post(client, "/update_weights_from_tensor", **as_parts(tensors))
    assert error.value.status == 400
    post(client, "/begin_weight_update")
    for part in (names[:9], names[9:]):
        post(client, "/update_weights_from_tensor", weight_version="5", **as_parts({n: tensors[n] for n in part}))
    answer = post(client, "/end_weight_update")
    assert answer["fingerprint"] == fingerprint(tensors.items()) and answer["version"] == "5"
    assert asyncio.run(client.generate(ASK))["meta_info"]["weight_version"] == "5"


def test_what_was_left_out_stops_the_engine_until_it_is_mended(served, models):
    client, tensors, _ = served
    names = list(tensors)
    post(client, "/begin_weight_update")
    post(client, "/update_weights_from_tensor", **as_parts({n: tensors[n] for n in names[1:]}))
    with pytest.raises(EngineRefusedError, match=names[0].replace(".", r"\.")):
        post(client, "/end_weight_update")
    with pytest.raises(EngineRefusedError, match="left out 1 weight"):
        asyncio.run(client.generate(ASK))
    with pytest.raises(EngineRefusedError, match="left out"):
        asyncio.run(client.fingerprint())
    asyncio.run(client.update_weights(WeightUpdate(kind="disk", version=1, folder=models("llama", seed=1))))
    assert asyncio.run(client.generate(ASK))["output_ids"]


def test_pickles_are_not_opened(served):
    client, tensors, _ = served
    post(client, "/begin_weight_update")
    with pytest.raises(EngineRefusedError, match="pickle"):
        post(client, "/update_weights_from_tensor", **as_parts(tensors, "flattened_bucket"))
    with pytest.raises(EngineRefusedError, match="not a safetensors file"):
        post(client, "/update_weights_from_tensor", serialized_named_tensors=["QUJD"], load_format="safetensors")


def test_pickles_are_opened_where_the_engine_was_started_so(models):
    """SGLang's own wire forms: pickled (name, tensor) pairs without a load_format, and flattened buckets."""
    tensors = load_file(models("llama", seed=1) / "model.safetensors")
    own = EmbeddedEngine(models("llama"), slots=2, max_context=64)
    url, stop = start_server_thread(own, allow_pickle=True)
    client = HttpEngine(url, timeout_s=30)
    post(client, "/begin_weight_update")
    post(client, "/update_weights_from_tensor", **{**as_parts(tensors, "pickle"), "load_format": None})
    with pytest.raises(EngineRefusedError, match="unknown load_format 'direct'"):
        post(client, "/update_weights_from_tensor", **{**as_parts(tensors), "load_format": "direct"})
    assert post(client, "/end_weight_update")["fingerprint"] == fingerprint(tensors.items())
    flipped = {name: -tensor for name, tensor in tensors.items()}
    made, _, _ = buckets.stage(flipped.items(), version=2, key=str(models("llama")))
    post(client, "/begin_weight_update")
    for part, reason in (
        (pickle.dumps(list(tensors.items())), "_rebuild_tensor_v2, which is not admitted"),
        (b"", "not a"),
    ):
        with pytest.raises(EngineRefusedError, match=reason):
            parts = {"serialized_named_tensors": [base64.b64encode(part).decode()], "load_format": "flattened_bucket"}
            post(client, "/update_weights_from_tensor", **parts)
    with sglang_wire.offered(made[0]) as text:
        parts = {"serialized_named_tensors": [text], "load_format": "flattened_bucket"}
        post(client, "/update_weights_from_tensor", **parts)
    assert post(client, "/end_weight_update")["fingerprint"] == fingerprint(flipped.items())
    asyncio.run(client.close())
    stop()


def test_over_a_process_group(served, models):
    client, tensors, _ = served
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    path = models("llama", seed=1) / "model.safetensors"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port), str(path)])
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    asyncio.run(client.join_group({**address, "group_name": "push", "backend": "gloo"}))
    group = {
        "names": list(tensors),
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(t.shape) for t in tensors.values()],
        "group_name": "push",
    }
    receipt = asyncio.run(client.update_weights(WeightUpdate(kind="distributed", version=9, group=group)))
    assert trainer.wait(20) == 0
    assert (receipt.version, receipt.fingerprint) == (9, fingerprint(tensors.items()))
    asyncio.run(client.leave_group("push"))
    with pytest.raises(EngineRefusedError, match="no group"):
        asyncio.run(client.leave_group("push"))
    uneven = WeightUpdate(kind="distributed", version=9, group={**group, "names": []})
    for _ in range(2):  # a refusal does not leave the server between begin and end
        with pytest.raises(EngineRefusedError, match="equal lists"):
            asyncio.run(client.update_weights(uneven))
    assert asyncio.run(client.generate(ASK))["output_ids"]


def test_a_failure_half_way_is_not_hidden(served):
    client, tensors, own = served

    def dying():
        yield from list(tensors.items())[:5]
        raise OSError("the link is gone")

    headers = [(n, tuple(t.shape), "float32") for n, t in tensors.items()]
    with pytest.raises(OSError, match="link"):
        asyncio.run(own.weights._take(lambda: [Incoming(headers=headers, tensors=dying())], "2", "finish"))
    with pytest.raises(SlimeError, match="half-way"):
        asyncio.run(client.generate(ASK))
    assert not asyncio.run(client.info())["weights_ready"]


def test_manifest_faults(served, tmp_path):
    client, _, _ = served
    broken = tmp_path / "m.json"
    cases = [
        ("{}", "not a weight manifest"),
        ('{"buffer": "/nope", "version": 1, "tensors": []}', "not a weight manifest"),
    ]
    entry = {"name": "w", "dtype": "float32", "shape": [1], "offset": -4, "nbytes": 4}
    for wild in (entry, {**entry, "offset": 1 << 20}, {**entry, "offset": 8, "nbytes": -4}):
        told = {"buffer": str(broken), "version": 1, "tensors": [wild]}
        cases.append((json.dumps(told), "w lies outside"))
    for text, reason in cases:
        broken.write_text(text)
        with pytest.raises(SlimeError, match=reason):
            asyncio.run(client.update_weights(WeightUpdate(kind="shared_memory", version=1, manifest=broken)))
    with pytest.raises(SlimeError, match="no manifest"):
        absent = WeightUpdate(kind="shared_memory", version=1, manifest=tmp_path / "x.json")
        asyncio.run(client.update_weights(absent))
