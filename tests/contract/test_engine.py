"""What every rollout engine must do: in this process and over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.engines.pool import EnginePool
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine, WeightUpdate
from slimecli.sync.shared_memory import write
from slimecli.weights.fingerprint import fingerprint
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("engines")
    return [tiny_model(root / f"m{seed}", "qwen3", seed=seed) for seed in (0, 1)]


@pytest.fixture(params=["in_process", "http", "pool"])
def engine(request, folders):
    """The same engine through each of its doors; `under` is the EmbeddedEngine behind it."""
    own = EmbeddedEngine(folders[0], slots=8, max_context=256)
    if request.param == "in_process":
        own.under = own
        yield own
        asyncio.run(own.close())
        return
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    door = client if request.param == "http" else EnginePool([client])
    door.under = own
    yield door
    asyncio.run(door.close())
    stop()


def run(engine, **payload):
    return asyncio.run(engine.generate({"return_logprob": True, **payload}))


def update_from(folder, version, tmp_path, kind="disk"):
    if kind == "disk":
        return WeightUpdate(kind="disk", version=version, folder=folder)
    manifest, _ = write(load_file(folder / "model.safetensors").items(), version=version, key=str(tmp_path))
    return WeightUpdate(kind="shared_memory", version=version, manifest=manifest)


def test_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)


def test_greedy_equals_transformers_and_reply_has_sglangs_form(engine, folders):
    reference = AutoModelForCausalLM.from_pretrained(folders[0])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    reply = run(engine, text="What is 2 + 3?", sampling_params={"temperature": 0, "max_new_tokens": 10})
    ids = tokenizer("What is 2 + 3?")["input_ids"]
    expected = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10)[0, len(ids) :].tolist()
    meta = reply["meta_info"]
    assert reply["output_ids"] == expected == [t for _, t, _ in meta["output_token_logprobs"]]
    assert reply["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert meta["finish_reason"] == {"type": "length", "length": 10}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), 10)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 10}]


def test_seeds_lists_and_n(engine):
    params = [{"sampling_seed": s, "max_new_tokens": 8, "ignore_eos": True} for s in (1, 2, 1)]
    first, second, again = run(engine, input_ids=[[5, 6, 7]] * 3, sampling_params=params)
    assert first["output_ids"] == again["output_ids"] != second["output_ids"]
    assert len({r["meta_info"]["id"] for r in (first, second, again)}) == 3
    group = run(engine, input_ids=[5, 6, 7], sampling_params={**params[0], "n": 3})
    assert len(group) == 3 and group[0]["output_ids"] == first["output_ids"]
    assert len({tuple(r["output_ids"]) for r in group}) == 3
    assert run(engine, input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0})["output_ids"] == []


def test_input_logprobs(engine, folders):
    prompt = [5, 60, 7, 80, 9]
    meta = run(
        engine, input_ids=prompt, logprob_start_len=0, top_logprobs_num=2, sampling_params={"max_new_tokens": 2}
    )["meta_info"]
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    given = meta["input_token_logprobs"]
    assert given[0] == [None, 5, None] and [t for _, t, _ in given] == prompt
    for i in range(1, 5):
        assert given[i][0] == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-5)
        assert [t for _, t, _ in meta["input_top_logprobs"][i]] == expected[i - 1].topk(2)[1].tolist()
    assert [len(t) for t in meta["output_top_logprobs"]] == [2, 2]


def test_stop_strings_across_token_borders(engine, folders):
    params = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True}
    whole = run(engine, input_ids=[9, 8], sampling_params=params)
    text = whole["text"]
    at = next(i for i in range(5, len(text) - 3) if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i)
    stop = text[at : at + 2]
    cut = run(engine, input_ids=[9, 8], sampling_params={**params, "stop": [stop, "never to be seen"]})
    assert cut["text"] == whole["text"][:at]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["output_ids"] == whole["output_ids"][: len(cut["output_ids"])] != whole["output_ids"]
    kept = run(engine, input_ids=[9, 8], sampling_params={**params, "stop": stop, "no_stop_trim": True})
    assert kept["text"].startswith(whole["text"][: at + len(stop)])
    end = whole["output_ids"][4]
    ended = run(engine, input_ids=[9, 8], sampling_params={**params, "stop_token_ids": [end]})
    assert ended["output_ids"][-1] == end and ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"text": "a", "sampling_params": {"temperatur": 1}}, "'temperatur' is not known to this engine (did you mean"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature = -1 is outside"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "'regex' is not known"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens = 1.5 is not an integer"),
        ({"text": "a", "lora_path": "x"}, "'lora_path' is not known"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": [1, 300]}, "no token id in 0..299"),
        ({"input_ids": []}, "must be a list of token ids"),
        ({"input_ids": [[1], []]}, "prompt 1 is empty"),
        ({"input_ids": [1] * 250}, "250 tokens and asks for 128: 378 tokens exceed the engine's context of 256"),
        ({"input_ids": [[1]], "sampling_params": [{}, {}]}, "2 sampling_params for 1 prompts"),
    ],
)
def test_bad_payloads_are_refused_by_name(engine, payload, reason):
    with pytest.raises(SlimeError) as error:
        run(engine, **payload)
    assert reason in str(error.value)
    assert run(engine, input_ids=[1, 2], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_abort_answers_with_what_there_is(engine):
    async def scene():
        params = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 1}
        await engine.under.pause("in_place")
        tasks = [
            asyncio.create_task(engine.generate({"input_ids": [3, 4], "sampling_params": params, "rid": r}))
            for r in ("one", "one_2")
        ]
        await until(lambda: engine.under.info()["waiting"] + engine.under.info()["running"] == 2)
        await engine.abort("one")
        first = await tasks[0]
        assert not tasks[1].done()
        await engine.under.resume()
        await until(lambda: engine.under.info()["generated_tokens"] > 3)
        await engine.abort()
        return first, await tasks[1]

    first, second = asyncio.run(scene())
    assert first["meta_info"]["finish_reason"]["type"] == second["meta_info"]["finish_reason"]["type"] == "abort"
    assert first["output_ids"] == [] and 0 < len(second["output_ids"]) < 200


async def until(condition, seconds=10.0):
    """Wait for the engine's thread to come to a state."""
    for _ in range(int(seconds / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("not reached in time")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_update_in_mid_flight_marks_versions(engine, folders, mode, tmp_path):
    async def scene():
        params = {"max_new_tokens": 220, "ignore_eos": True, "sampling_seed": 1}
        payload = {"input_ids": [3, 4], "sampling_params": params, "return_logprob": True}
        task = asyncio.create_task(engine.generate(payload))
        await until(lambda: engine.under.info()["generated_tokens"] > 3)
        await engine.under.pause(mode)
        receipt = await engine.update_weights(update_from(folders[1], 7, tmp_path))
        before = engine.under.info()["generated_tokens"]
        await asyncio.sleep(0.02)
        assert engine.under.info()["generated_tokens"] == before, "a paused engine does not step"
        await engine.under.resume()
        return receipt, await task

    receipt, reply = asyncio.run(scene())
    assert receipt.version == 7
    spans = reply["meta_info"]["weight_versions"]
    cut = spans[0]["end"]
    assert spans == [{"version": "0", "start": 0, "end": cut}, {"version": "7", "start": cut, "end": 220}]
    assert reply["meta_info"]["num_retractions"] == (mode == "retract")
    if mode == "retract":
        ids = [3, 4, *reply["output_ids"]]
        model = AutoModelForCausalLM.from_pretrained(folders[1])
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for i, (value, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"]):
            close = abs(value - log_probs[i + 1, token].item()) < 1e-4
            assert close == (i >= cut), i


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
def test_update_changes_answers_and_proves_it(engine, folders, kind, tmp_path):
    def greedy():
        return run(engine, input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 8})["output_ids"]

    before = greedy()
    tensors = load_file(folders[1] / "model.safetensors")
    receipt = asyncio.run(engine.update_weights(update_from(folders[1], 3, tmp_path, kind)))
    assert receipt.version == 3 and receipt.fingerprint == fingerprint(tensors.items())
    assert receipt.bytes_ == sum(t.nbytes for t in tensors.values())
    after = greedy()
    fresh = EmbeddedEngine(folders[1], slots=8, max_context=256)
    expected = asyncio.run(
        fresh.generate({"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    )
    asyncio.run(fresh.close())
    assert after == expected["output_ids"] != before
    back = asyncio.run(engine.update_weights(update_from(folders[0], 4, tmp_path, kind)))
    assert greedy() == before and back.fingerprint != receipt.fingerprint


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape"])
def test_wrong_weights_leave_the_old_ones(engine, folders, fault, tmp_path):
    tensors = load_file(folders[1] / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "unknown":
        tensors["model.layers.1.mlp.upp_proj.weight"] = tensors[name].clone()
    elif fault == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name].T.contiguous()
    manifest, _ = write(tensors.items(), version=5, key=str(tmp_path))
    ask = {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    before, mark = run(engine, **ask)["output_ids"], asyncio.run(engine.under.fingerprint())
    with pytest.raises(SlimeError) as error:
        asyncio.run(engine.update_weights(WeightUpdate(kind="shared_memory", version=5, manifest=manifest)))
    assert {"unknown": "upp_proj", "missing": name, "shape": "[64, 192], this model needs [192, 64]"}[fault] in str(
        error.value
    )
    assert run(engine, **ask)["output_ids"] == before
    assert asyncio.run(engine.under.fingerprint()) == mark


def test_sleep_frees_and_wake_asks_for_weights(engine, folders, tmp_path):
    ask = {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    before = run(engine, **ask)["output_ids"]
    held = engine.under.info()
    asyncio.run(engine.sleep())
    asleep = engine.under.info()
    assert held["weight_bytes"] > 0 and held["kv_cache_bytes"] > 0
    assert asleep["weight_bytes"] == asleep["kv_cache_bytes"] == 0
    with pytest.raises(SlimeError, match="cannot generate"):
        run(engine, **ask)
    asyncio.run(engine.wake(("weights",)))
    with pytest.raises(SlimeError, match="push"):
        run(engine, **ask)
    asyncio.run(engine.update_weights(update_from(folders[0], 2, tmp_path)))
    asyncio.run(engine.wake(("kv_cache",)))
    assert run(engine, **ask)["output_ids"] == before
    with pytest.raises(SlimeError, match="unknown memory tag"):
        asyncio.run(engine.sleep(("weight",)))


def test_an_exception_on_the_engines_thread_reaches_everyone(engine, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.under.model, "decode", broken)

    async def scene():
        payload = {"input_ids": [[5, 6]] * 12, "sampling_params": {"max_new_tokens": 4}}
        return await asyncio.wait_for(
            asyncio.gather(*(engine.generate(payload) for _ in range(3)), return_exceptions=True), 20
        )

    for error in asyncio.run(scene()):
        assert isinstance(error, SlimeError) and "out of luck" in str(error)
    monkeypatch.undo()
    assert (
        len(run(engine, input_ids=[5, 6], sampling_params={"max_new_tokens": 4, "ignore_eos": True})["output_ids"]) == 4
    )


def test_closing_answers_those_who_wait(folders):
    own = EmbeddedEngine(folders[0], slots=4, max_context=256)

    async def scene():
        await own.pause("in_place")
        task = asyncio.create_task(own.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}}))
        await until(lambda: own.info()["waiting"] == 1)
        await own.close()
        await own.close()
        with pytest.raises(SlimeError, match="closed"):
            await task

    asyncio.run(scene())
    with pytest.raises(SlimeError, match="closed"):
        asyncio.run(own.generate({"input_ids": [1]}))


def test_bfloat16_weights_in_a_float32_engine_keep_their_fingerprint(folders):
    own = EmbeddedEngine(folders[0], slots=4, max_context=64)
    tensors = {k: t.bfloat16() for k, t in load_file(folders[1] / "model.safetensors").items()}
    receipt = asyncio.run(own.update_weights(WeightUpdate(kind="in_process", version=1, tensors=tensors)))
    assert own.info()["dtype"] == "float32" and receipt.fingerprint == fingerprint(tensors.items())
    own.model.live["model.norm.weight"][3] += 1e-6
    assert asyncio.run(own.fingerprint()) != receipt.fingerprint
    asyncio.run(own.close())


def test_recorded_form_survives_json(engine):
    reply = run(engine, input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    assert json.loads(json.dumps(reply)) == reply
