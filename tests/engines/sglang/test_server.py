"""What an engine behind HTTP must do: the embedded engine and a real SGLang server, through the same client.

Greedy answers and log-probs are held against transformers, so that both engines are held against each other.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimecli.engines.http_errors import EngineRefusedError
from slimecli.engines.sglang.proof import prove
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.sync.push import push
from slimecli.sync.stage import stage_weights
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.engines.sglang.conftest import until_busy

GREEDY = {"temperature": 0, "max_new_tokens": 12}
PROMPTS = ([5, 6, 7], [60, 8, 100, 9, 33], list(range(40, 80)))


def generate(client, **payload):
    return asyncio.run(client.generate({"return_logprob": True, **payload}))


def call(client, method, path, payload=None):
    return asyncio.run(client.call(method, path, payload, "being tested"))


@pytest.fixture
def restored(served, models):
    """The weights of seed 0 are put back afterwards."""
    yield served
    asyncio.run(served.update_weights(WeightUpdate(kind="disk", version=0, folder=models("qwen3"))))


@pytest.fixture(scope="module")
def reference(models):
    """seed -> the model in transformers."""
    return [AutoModelForCausalLM.from_pretrained(models("qwen3", seed)) for seed in (0, 1)]


def expected(model, prompt, new=12):
    """(ids, log-probs) of a greedy answer, end token included."""
    ids, marks = list(prompt), []
    with torch.no_grad():
        for _ in range(new):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            marks.append(scores.max().item())
            if ids[-1] == 2:
                break
    return ids[len(prompt) :], marks


def assert_greedy(replies, model):
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        ids, marks = expected(model, prompt)
        assert reply["output_ids"] == ids == [t for _, t, _ in reply["meta_info"]["output_token_logprobs"]]
        given = [x for x, _, _ in reply["meta_info"]["output_token_logprobs"]]
        assert given == pytest.approx(marks, abs=1e-5)


def test_greedy_answers_equal_transformers(served, reference):
    assert_greedy(generate(served, input_ids=[*PROMPTS], sampling_params=[GREEDY] * 3), reference[0])


def test_text_in_text_out(served, models):
    tokenizer = AutoTokenizer.from_pretrained(models("qwen3"))
    ids = tokenizer("What is 2 + 3?")["input_ids"]
    reply = generate(served, text="What is 2 + 3?", sampling_params=GREEDY)
    assert reply["meta_info"]["prompt_tokens"] == len(ids)
    assert reply["output_ids"] == generate(served, input_ids=ids, sampling_params=GREEDY)["output_ids"]
    assert reply["text"] == tokenizer.decode(reply["output_ids"], skip_special_tokens=True)


def test_several_answers_and_log_probs_of_what_was_sampled(served, reference):
    sampling = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True, "n": 3}
    replies = generate(served, input_ids=[9, 8, 7], sampling_params=sampling)
    assert len({r["meta_info"]["id"] for r in replies}) == 3
    assert len({tuple(r["output_ids"]) for r in replies}) > 1
    for reply in replies:
        ids = [9, 8, 7, *reply["output_ids"]]
        with torch.no_grad():
            scores = reference[0](torch.tensor([ids])).logits[0].log_softmax(-1)
        for i, (value, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"]):
            assert value == pytest.approx(scores[2 + i, token].item(), abs=1e-5)


def test_log_probs_of_the_prompt(served, reference):
    prompt = [5, 60, 7, 80, 9]
    meta = generate(served, input_ids=prompt, logprob_start_len=0, sampling_params={"max_new_tokens": 1})["meta_info"]
    with torch.no_grad():
        scores = reference[0](torch.tensor([prompt])).logits[0].log_softmax(-1)
    given = meta["input_token_logprobs"]
    assert given[0] == [None, 5, None] and [t for _, t, _ in given] == prompt
    assert [x for x, _, _ in given[1:]] == pytest.approx([scores[i, prompt[i + 1]].item() for i in range(4)], abs=1e-5)


def test_stops(served, reference):
    ids, _ = expected(reference[0], [5, 6, 7])
    ended = generate(served, input_ids=[5, 6, 7], sampling_params={**GREEDY, "stop_token_ids": [ids[3]]})
    cut = ids.index(ids[3]) + 1
    assert ended["output_ids"] == ids[:cut]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}
    whole = generate(served, text="What", sampling_params={**GREEDY, "ignore_eos": True})["text"]
    stop = next(c for c in whole[1:] if c.isascii())
    kept = generate(served, text="What", sampling_params={**GREEDY, "stop": [stop, "never"], "no_stop_trim": True})
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert kept["text"] == whole[: whole.index(stop) + 1]


def test_abort_answers_with_what_there_is(served):
    async def scene():
        payload = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        tasks = [asyncio.create_task(served.generate({**payload, "rid": rid})) for rid in ("one", "two")]
        await until_busy(served, 2, *tasks)
        await served.abort("one")
        first = await tasks[0]
        assert not tasks[1].done()
        await served.abort()
        return first, await tasks[1]

    for reply in asyncio.run(scene()):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 400


def test_a_paused_engine_does_not_step(served):
    async def scene():
        await served.pause("in_place")
        task = asyncio.create_task(served.generate({"input_ids": [3], "sampling_params": {"max_new_tokens": 2}}))
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        await served.resume()
        return await task

    assert asyncio.run(scene())["meta_info"]["completion_tokens"] in (1, 2)


@pytest.mark.parametrize("kind", ["disk", "shared_memory", "tensor"])
def test_weights_arrive_and_are_proven(restored, models, reference, tmp_path, kind):
    take_seed_1(restored, models, reference, tmp_path, kind)


@pytest.mark.parametrize("served", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
def test_weights_arrive_by_broadcast(restored, models, reference, tmp_path):
    """For the embedded engine, whose process must not be the sender's, tests/contract/test_sync.py has this."""
    take_seed_1(restored, models, reference, tmp_path, "distributed")


def take_seed_1(served, models, reference, folder, kind):
    like = models("qwen3", 1)
    staged = stage_weights(HfFolder(like).iterate(), kind, version=7, folder=folder / "w", like=like, one_host=True)
    (receipt,) = asyncio.run(push([served], staged, 180))
    assert receipt.version == 7
    assert receipt.fingerprint == staged.fingerprint == fingerprint(HfFolder(like).iterate())
    replies = generate(served, input_ids=[*PROMPTS], sampling_params=[GREEDY] * 3)
    assert_greedy(replies, reference[1])
    assert {r["meta_info"]["weight_version"] for r in replies} == {"7"}


@pytest.mark.parametrize("served", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
def test_a_server_that_holds_something_else_is_named(restored, models):
    """It says that it has taken version 7; it has version 7 of other weights."""
    payload = {"model_path": str(models("qwen3", 1)), "weight_version": "7"}
    call(restored, "POST", "/update_weights_from_disk", payload)
    with pytest.raises(SlimeError, match=r"does not hold what it was sent: model\.embed_tokens\.weight, .* differ"):
        asyncio.run(prove(restored, HfFolder(models("qwen3")).iterate()))


def test_an_update_between_tokens_is_told_by_each_answer(restored, models):
    """Paused in place, updated, continued: which version said which token stands in the answer."""

    async def scene():
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        task = asyncio.create_task(restored.generate({"input_ids": [3, 4], "sampling_params": sampling}))
        await until_busy(restored, 1, task)
        await restored.pause("in_place")
        update = WeightUpdate(kind="disk", version=9, folder=models("qwen3", 1))
        await restored.update_weights(update)
        await restored.resume()
        return await task

    spans = asyncio.run(scene())["meta_info"]["weight_versions"]
    cut = spans[0]["end"]
    assert 0 < cut < 300
    assert spans == [{"version": "0", "start": 0, "end": cut}, {"version": "9", "start": cut, "end": 300}]


def test_a_folder_that_is_not_there_is_refused(served, tmp_path):
    with pytest.raises(EngineRefusedError, match="none"):
        call(served, "POST", "/update_weights_from_disk", {"model_path": str(tmp_path / "none")})
    assert generate(served, input_ids=[5], sampling_params=GREEDY)["output_ids"]


def test_sleep_and_wake_of_the_cache(served, reference):
    asyncio.run(served.pause("retract"))
    asyncio.run(served.sleep(("kv_cache",)))
    asyncio.run(served.wake(("kv_cache",)))
    asyncio.run(served.resume())
    assert_greedy(generate(served, input_ids=[*PROMPTS], sampling_params=[GREEDY] * 3), reference[0])


def test_openai_calls(served):
    ask = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 5}
    chat = call(served, "POST", "/v1/chat/completions", {**ask, "logprobs": True})
    (choice,) = chat["choices"]
    assert choice["message"]["role"] == "assistant" and chat["usage"]["completion_tokens"] <= 5
    assert len(choice["logprobs"]["content"]) == chat["usage"]["completion_tokens"]
    text = call(served, "POST", "/v1/completions", {"model": "m", "prompt": "What", "temperature": 0, "max_tokens": 4})
    native = generate(served, text="What", sampling_params={"temperature": 0, "max_new_tokens": 4})
    assert text["choices"][0]["text"] == native["text"]


def test_health_and_information(served, models):
    asyncio.run(served.health())
    info = asyncio.run(served.info())
    assert info["tp_size"] == 1 and info["max_total_num_tokens"] > 0
    assert call(served, "GET", "/model_info")["is_generation"] is True
    assert call(served, "GET", "/v1/models")["object"] == "list"


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5] * 600, "sampling_params": {"max_new_tokens": 4}}, "600"),
    ],
)
def test_refusals_say_why(served, payload, told):
    with pytest.raises(EngineRefusedError) as error:
        generate(served, **payload)
    assert error.value.status == 400 and told in error.value.what
