"""SGLang's payloads go in as its clients send them, and its reply shapes (recorded from 0.5.21, 0.5.23) come out."""

from __future__ import annotations

import asyncio

import pytest

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import EngineRefusedError, HttpEngine

REPLY = {"text": str, "output_ids": list, "meta_info": dict}
META = {
    "id": str,
    "finish_reason": dict,
    "prompt_tokens": int,
    "weight_version": str,
    "num_retractions": int,
    "input_token_logprobs": list,
    "output_token_logprobs": list,
    "completion_tokens": int,
    "cached_tokens": int,
    "weight_versions": list,
    "e2e_latency": float,
}
UPDATED = {"success": bool, "message": str}
UPDATE = {"load_format": None, "flush_cache": True, "abort_all_requests": False, "torch_empty_cache": False}
"""what SGLang's clients send with every update"""


@pytest.fixture(scope="module")
def served(models):
    own = EmbeddedEngine(models("qwen3"), slots=4, max_context=256)
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=20)
    yield client, own
    asyncio.run(client.close())
    stop()


def call(client, method, path, payload=None):
    return asyncio.run(client.call(method, path, payload, "being tested"))


def assert_shape(answer, shape):
    assert {k: type(answer.get(k)) for k in shape} == shape


def test_generate(served):
    client, _ = served
    payload = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "rid": "mine",
    }
    answer = call(client, "POST", "/generate", payload)
    assert_shape(answer, REPLY)
    meta = answer["meta_info"]
    assert_shape(meta, META)
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert [(type(p), type(t), x) for p, t, x in meta["output_token_logprobs"]] == [(float, int, None)] * 3
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 3}]


@pytest.mark.parametrize(
    ("method", "path", "payload", "shape"),
    [
        ("GET", "/get_model_info", None, {"model_path": str, "tokenizer_path": str, "is_generation": bool}),
        ("GET", "/get_server_info", None, {"version": str, "max_total_num_tokens": int, "tp_size": int}),
        ("GET", "/v1/models", None, {"object": str, "data": list}),
        ("GET", "/get_weight_version", None, {"weight_version": str}),
        ("POST", "/pause_generation", {"mode": "retract"}, {"status": str, "message": str}),
        ("POST", "/continue_generation", {"torch_empty_cache": True}, {"status": str, "message": str}),
        ("POST", "/begin_weight_update", {}, UPDATED),
        ("POST", "/end_weight_update", {}, UPDATED),
        ("POST", "/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, {}),
        ("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, {}),
    ],
)
def test_control_calls(served, method, path, payload, shape):
    assert_shape(call(served[0], method, path, payload), shape)


def test_update_from_disk_and_versions_that_are_no_numbers(served, models):
    client, _ = served
    payload = {"model_path": str(models("qwen3", seed=1)), "weight_version": "run-7", **UPDATE}
    assert_shape(call(client, "POST", "/update_weights_from_disk", payload), UPDATED)
    assert call(client, "GET", "/get_weight_version") == {"weight_version": "run-7"}
    answer = call(client, "POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert answer["meta_info"]["weight_versions"] == [{"version": "run-7", "start": 0, "end": 1}]


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}),
        ("/destroy_weights_update_group", {"group_name": "never made"}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "group_name": "x"}),
        ("/end_weight_update", {}),
    ],
)
def test_refusals_are_400_with_success_false(served, path, payload):
    with pytest.raises(EngineRefusedError) as error:
        call(served[0], "POST", path, payload)
    assert error.value.status == 400


@pytest.mark.parametrize("ender", ["abort_all_requests", "pause"])
def test_running_requests_end_where_sglang_ends_them(served, models, ender):
    """By an update that asks for it, and by a pause without a mode; the answers so far come back."""
    client, own = served

    async def scene():
        params = {"max_new_tokens": 240, "ignore_eos": True}
        task = asyncio.create_task(client.generate({"input_ids": [3], "sampling_params": params}))
        while own.info()["running"] == 0:
            await asyncio.sleep(0.001)
        if ender == "pause":
            await client.call("POST", "/pause_generation", {}, "being tested")
            await client.call("POST", "/continue_generation", {}, "being tested")
        else:
            payload = {**UPDATE, "model_path": str(models("qwen3")), "abort_all_requests": True}
            await client.call("POST", "/update_weights_from_disk", payload, "being tested")
        return await task

    answer = asyncio.run(scene())
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 240
