"""The HTTP surface beyond the contract: OpenAI's calls, streaming, status, errors, addresses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from slimecli.engines import open_engine
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.engines.pool import EnginePool
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.recipe import load_recipe

SAID = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine(models):
    own = EmbeddedEngine(models("qwen3"), slots=8, max_context=256)
    url, stop = start_server_thread(own)
    own.url = url
    yield own
    stop()
    stop()


def http(engine, path, payload=None, headers=None, raw=None):
    """(status, body) of one call."""
    data = raw if raw is not None else (json.dumps(payload).encode() if payload is not None else None)
    request = urllib.request.Request(engine.url + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_status_calls(engine):
    for path in ("/health", "/health_generate"):
        assert http(engine, path) == (200, "")
    info = json.loads(http(engine, "/get_model_info")[1])
    assert (
        info == json.loads(http(engine, "/model_info")[1]) and info["is_generation"] and info["weight_version"] == "0"
    )
    server = json.loads(http(engine, "/server_info")[1])
    assert (server["max_running_requests"], server["context_length"], server["dtype"]) == (8, 256, "float32")
    assert json.loads(http(engine, "/v1/models")[1])["data"][0]["max_model_len"] == 256
    assert json.loads(http(engine, "/v1/loads?include=core")[1])["loads"][0]["num_reqs"] == 0
    assert json.loads(http(engine, "/get_weight_version")[1]) == {"weight_version": "0"}
    assert json.loads(http(engine, "/tokenize", {"prompt": "What is"})[1])["tokens"] == engine.codec.encode("What is")
    assert http(engine, "/flush_cache")[0] == http(engine, "/flush_cache", {})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/generate", b"{", 400, "not JSON"),
        ("/generate", b"[]", 400, "JSON object"),
        ("/generate", b'{"stream": true}', 400, "either text or input_ids"),
        ("/generat", b"{}", 404, "/generat"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages must be"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "functions": [1]}', 400, "'functions'"),
        ("/v1/completions", b'{"prompt": 3}', 400, "prompt must be"),
        ("/abort_request", b"{}", 400, "give rid"),
        ("/pause_generation", b'{"mode": "nap"}', 400, "unknown pause mode"),
        ("/update_weights_from_disk", b'{"model_path": "/nope"}', 400, "is not a folder"),
        ("/release_memory_occupation", b'{"tags": ["kv"]}', 400, "unknown memory tag"),
        ("/release_memory_occupation", b'{"tags": 5}', 400, "tags"),
        ("/tokenize", b'{"prompt": [5]}', 400, "give prompt"),
        ("/generate", b'{"text": "a", "sampling_params": {"stop": 7}}', 400, "stop"),
        ("/generate", b'{"text": "a", "return_logprob": true, "top_logprobs_num": "q"}', 400, "top_logprobs_num"),
        ("/generate", b'{"text": "a", "sampling_params": {"logit_bias": {"5": 1e300}}}', 400, "logit_bias"),
        ("/v1/completions", b'{"prompt": "a", "logprobs": "x"}', 400, "logprobs"),
    ],
)
def test_errors_have_a_reason_and_no_traceback(engine, path, body, status, reason):
    code, text = http(engine, path, raw=body)
    message = json.loads(text)["error"]["message"]
    assert code == status and reason in message and "Traceback" not in text


def test_a_request_that_makes_no_sense_costs_the_others_nothing(engine):
    """What is wrong in one request is found before it shares a batch with anybody."""
    long = {"text": "What is", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}}
    wrong = {"text": "a", "return_logprob": True, "top_logprobs_num": -1, "sampling_params": {"max_new_tokens": 2}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(http, engine, "/generate", long)
        while not json.loads(http(engine, "/v1/loads")[1])["num_running_reqs"]:
            assert not other.done()
        status, told = http(engine, "/generate", wrong)
        assert not other.done() and status == 400 and "top_logprobs_num" in told
        status, answer = other.result()
    assert status == 200 and json.loads(answer)["meta_info"]["completion_tokens"] == 200


def test_generate_streams_what_it_would_have_said(engine):
    payload = {"text": "What is", "sampling_params": SAID, "return_logprob": True}
    whole = json.loads(http(engine, "/generate", payload)[1])
    parts = events(http(engine, "/generate", {**payload, "stream": True})[1])
    assert [len(p["output_ids"]) for p in parts] == list(range(1, 13))
    assert [p["meta_info"]["finish_reason"] for p in parts[:-1]] == [None] * 11
    assert parts[-1]["output_ids"] == whole["output_ids"] and parts[-1]["text"] == whole["text"]
    assert parts[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("chat", [True, False])
def test_openai_calls(engine, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]} if chat else {"prompt": "What is 2 + 3?"}
    ask |= {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": True if chat else 1}
    answer = json.loads(http(engine, path, ask)[1])
    text = (
        engine.codec.tokenizer.apply_chat_template(ask["messages"], tokenize=False, add_generation_prompt=True)
        if chat
        else ask["prompt"]
    )
    params = {"max_new_tokens": 12, "sampling_seed": 3, "n": 2}
    expected = json.loads(http(engine, "/generate", {"text": text, "sampling_params": params})[1])
    choices = answer["choices"]
    said = [c["message"]["content"] if chat else c["text"] for c in choices]
    assert said == [e["text"] for e in expected] and said[0] != said[1]
    assert answer["usage"]["completion_tokens"] == sum(len(e["output_ids"]) for e in expected)
    count = len(choices[0]["logprobs"]["content"] if chat else choices[0]["logprobs"]["tokens"])
    assert count == len(expected[0]["output_ids"])
    parts = events(http(engine, path, {**ask, "stream": True, "stream_options": {"include_usage": True}})[1])
    assert parts[-1]["usage"] == answer["usage"]
    for index in (0, 1):
        mine = [c for p in parts[:-1] for c in p["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") if chat else c["text"] for c in mine) == said[index]
        assert [c["finish_reason"] for c in mine][-1] == choices[index]["finish_reason"]


def test_streamed_stop_string_never_shows(engine):
    ask = {"prompt": "ab", "max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    text = json.loads(http(engine, "/v1/completions", ask)[1])["choices"][0]["text"]
    at = next(i for i in range(4, len(text) - 3) if text[i : i + 3].isascii() and text.index(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    parts = events(http(engine, "/v1/completions", {**ask, "stop": stop, "stream": True})[1])
    assert "".join(p["choices"][0]["text"] for p in parts) == text[:at]


def test_a_caller_who_leaves_frees_the_slot(engine):
    client = HttpEngine(engine.url, timeout_s=20)

    async def leave():
        params = {"max_new_tokens": 240, "ignore_eos": True}
        await engine.pause("in_place")
        task = asyncio.create_task(client.generate({"input_ids": [3], "sampling_params": params, "rid": "gone"}))
        while engine.info()["waiting"] == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        for _ in range(1000):
            if engine.info()["waiting"] == 0:
                break
            await asyncio.sleep(0.005)
        await engine.resume()
        await client.close()

    asyncio.run(leave())
    assert engine.info()["waiting"] == engine.info()["running"] == 0


def test_api_key_and_used_port(models):
    own = EmbeddedEngine(models("qwen3"), slots=2, max_context=64)
    own.url, stop = start_server_thread(own, api_key="s3cret")
    try:
        assert http(own, "/server_info")[0] == 401 and http(own, "/health")[0] == 200
        assert http(own, "/server_info", headers={"Authorization": "Bearer s3cret"})[0] == 200
        for name in ("Authorization", "x-api-key"):
            assert http(own, "/server_info", headers={name: "s3cret\xff"})[0] == 401, "any bytes may stand in a header"
        client = HttpEngine(own.url, timeout_s=20, api_key="s3cret")
        assert asyncio.run(client.info())["slots"] == 2
        asyncio.run(client.close())
        with pytest.raises(SlimeError, match="is in use") as error:
            start_server_thread(own, port=int(own.url.rpartition(":")[2]))
        assert "--port 0" in error.value.fix
    finally:
        stop()


def test_client_says_what_it_was_doing():
    client = HttpEngine("http://127.0.0.1:9", timeout_s=5, retries=0)
    with pytest.raises(SlimeError, match=r"no connection to the engine at http://127.0.0.1:9 while generating"):
        asyncio.run(client.generate({"input_ids": [1]}))
    asyncio.run(client.close())


def test_deadline(engine):
    client = HttpEngine(engine.url, timeout_s=0.3)

    async def scene():
        await engine.pause("in_place")
        try:
            await client.generate({"input_ids": [3], "sampling_params": {"max_new_tokens": 4}})
        finally:
            await engine.resume()
            await client.close()

    with pytest.raises(SlimeError, match=r"did not answer within 0.3 s while generating"):
        asyncio.run(scene())


def test_pool_splits_in_order_and_names_the_dead(engine, models):
    second = EmbeddedEngine(models("qwen3"), slots=8, max_context=256)
    url, stop = start_server_thread(second)
    pool = EnginePool([HttpEngine(u, timeout_s=20, retries=0) for u in (engine.url, url)])
    params = [{"max_new_tokens": 5, "sampling_seed": i, "ignore_eos": True} for i in range(5)]
    payload = {"input_ids": [[7, i + 3] for i in range(5)], "sampling_params": params}
    before = (engine.info()["generated_tokens"], second.info()["generated_tokens"])
    replies = asyncio.run(pool.generate(payload))
    alone = asyncio.run(engine.generate(payload))
    assert [r["output_ids"] for r in replies] == [r["output_ids"] for r in alone]
    assert second.info()["generated_tokens"] - before[1] == 10
    for _ in range(3):
        asyncio.run(
            pool.generate({"input_ids": [3], "routing_key": "chat-1", "sampling_params": {"max_new_tokens": 1}})
        )
    used = second.info()["generated_tokens"] - before[1] - 10
    assert used in (0, 3), "one conversation stays on one engine"
    stop()
    with pytest.raises(SlimeError, match=url):
        asyncio.run(pool.generate(payload))
    with pytest.raises(SlimeError, match=f"1 of 2 engines: engine 1 at {url}"):
        asyncio.run(pool.abort())
    asyncio.run(pool.close())


def test_open_engine(engine, models):
    attached = open_engine(load_recipe(overrides=(f"engine.urls=['{engine.url}']",)), models("qwen3"))
    own = open_engine(load_recipe(overrides=("engine.slots=2", "engine.max_context=64")), models("qwen3"))
    for found in (attached, own):
        assert isinstance(found, RolloutEngine)
        reply = asyncio.run(found.generate({"input_ids": [5], "sampling_params": SAID}))
        assert reply["meta_info"]["completion_tokens"] > 0
        asyncio.run(found.close())
    with pytest.raises(SlimeError, match="has no SGLang"):
        open_engine(load_recipe(overrides=("engine.backend='sglang'",)), models("qwen3"))


def test_a_failed_step_leaves_its_traceback_in_the_log(models, tmp_path, monkeypatch):
    recipe = load_recipe(overrides=("engine.slots=2", "engine.max_context=64"))
    own = open_engine(recipe, models("qwen3"), logs=tmp_path / "logs")
    monkeypatch.setattr(own.model, "decode", lambda *_: 1 / 0)
    with pytest.raises(SlimeError, match="ZeroDivisionError"):
        asyncio.run(own.generate({"input_ids": [5], "sampling_params": SAID}))
    assert "ZeroDivisionError: division by zero" in (tmp_path / "logs" / "engine.log").read_text()
    asyncio.run(own.close())


def test_module_serves_and_ends_on_sigterm(models):
    command = [
        sys.executable,
        "-m",
        "slimecli.engines.embedded",
        "--model",
        str(models("qwen3")),
        "--max-context",
        "64",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = json.loads(process.stdout.readline())["url"]
        client = HttpEngine(url, timeout_s=20)
        assert asyncio.run(client.generate({"input_ids": [5], "sampling_params": SAID}))["output_ids"]
        asyncio.run(client.close())
        process.terminate()
        assert process.wait(20) == 0


def test_a_log_whose_folder_is_gone_ends_nobody(tmp_path):
    """What an engine's thread fails with still reaches those who wait."""
    from slimecli.engines import _log_to

    _log_to(tmp_path / "logs")
    (tmp_path / "logs").rmdir()
    logging.getLogger("slimecli.engine").error("nobody will read this")
    assert not (tmp_path / "logs").exists()
