"""The decoder against transformers, and bits that do not depend on company."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.kv import KVCache
from slimecli.errors import SlimeError

PROMPTS = [[3 + i * 7 % 290, 5, 9, 20 + i, 7, 8, 1][: 1 + i % 7] for i in range(9)] + [list(range(10, 90))]


def ask(engine, prompts, **sampling):
    payload = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    return asyncio.run(engine.generate(payload))


def bits(reply):
    return reply["output_ids"], [x[0] for x in reply["meta_info"]["output_token_logprobs"]]


@pytest.fixture
def open_engine():
    opened = []

    def make(folder, **options):
        opened.append(EmbeddedEngine(folder, **{"slots": 16, "max_context": 192, **options}))
        return opened[-1]

    yield make
    for engine in opened:
        asyncio.run(engine.close())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_equal_to_transformers(models, open_engine, family):
    folder = models(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = open_engine(folder, slots=5)
    for prompt, reply in zip(PROMPTS, ask(engine, PROMPTS, temperature=0, max_new_tokens=12), strict=True):
        expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
        assert reply["output_ids"] == expected.tolist()
    for temperature in (1.0, 0.6):
        replies = ask(engine, PROMPTS, temperature=temperature, max_new_tokens=30, sampling_seed=4, ignore_eos=True)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            ids, log_probs = bits(reply)
            assert len(ids) == 30
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + ids])).logits[0] / temperature
            expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)


def test_answer_does_not_depend_on_company(models, open_engine):
    folder = models("qwen3")
    chooser = random.Random(0)
    prompts = [
        [chooser.randrange(3, 300) for _ in range(chooser.choice([1, 2, 15, 16, 17, 18, 40, 70]))] for _ in range(20)
    ]
    extras = [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.02}, {"frequency_penalty": 0.5}, {"min_new_tokens": 4}]
    jobs = [
        (
            prompts[i % 20],
            {
                "temperature": [1.0, 0.7][i % 2],
                "max_new_tokens": [5, 33, 70, 12][i % 4],
                "sampling_seed": i,
                **extras[i % 5],
            },
        )
        for i in range(40)
    ]

    def run(engine, order):
        payload = {
            "input_ids": [jobs[i][0] for i in order],
            "sampling_params": [jobs[i][1] for i in order],
            "return_logprob": True,
        }
        return dict(zip(order, map(bits, asyncio.run(engine.generate(payload))), strict=True))

    wide = open_engine(folder, slots=64)
    together = run(wide, list(range(40)))
    alone = {i: run(wide, [i])[i] for i in range(40)}
    shuffled = list(range(40))
    chooser.shuffle(shuffled)
    for other in (
        alone,
        run(open_engine(folder, slots=3), shuffled),
        run(open_engine(folder, slots=17), shuffled[::-1]),
    ):
        for i in range(40):
            assert other[i][0] == together[i][0]
            assert torch.equal(torch.tensor(other[i][1]), torch.tensor(together[i][1]))
    assert len({tuple(ids) for ids, _ in together.values()}) > 30


def test_shared_prompt_is_computed_once(models, open_engine):
    engine = open_engine(models("qwen3"))
    prompt = list(range(20, 60))
    replies = ask(engine, [prompt] * 8, temperature=1.0, max_new_tokens=6, sampling_seed=9, ignore_eos=True)
    assert sorted(r["meta_info"]["cached_tokens"] for r in replies) == [0] + [39] * 7
    assert all(bits(r) == bits(replies[0]) for r in replies)


def test_sampling_follows_the_distribution(models, open_engine):
    """20,000 first tokens against the model's own probabilities, by a chi-square distance."""
    engine = open_engine(models("qwen3"), slots=256)
    count = 20_000
    payload = {
        "input_ids": [[30, 31]] * count,
        "sampling_params": [{"max_new_tokens": 1, "sampling_seed": i} for i in range(count)],
    }
    said = torch.tensor([r["output_ids"][0] for r in asyncio.run(engine.generate(payload))])
    reference = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        p = reference(torch.tensor([[30, 31]])).logits[0, -1].softmax(-1)
    expected = p * count
    seen = torch.bincount(said, minlength=300)
    usual = expected > 5
    chi = ((seen - expected)[usual] ** 2 / expected[usual]).sum() / usual.sum()
    assert 0.7 < chi < 1.3, chi


def test_top_k_top_p_min_p(models, open_engine):
    engine = open_engine(models("qwen3"))
    reference = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        p, ids = reference(torch.tensor([[30, 31]])).logits[0, -1].softmax(-1).sort(descending=True)
    allowed = {
        "top_k": (3, set(ids[:3].tolist())),
        "top_p": (0.3, set(ids[: int((p.cumsum(-1) - p < 0.3).sum())].tolist())),
        "min_p": (0.5, set(ids[p >= 0.5 * p[0]].tolist())),
    }
    for name, (value, tokens) in allowed.items():
        params = [{"max_new_tokens": 1, "sampling_seed": i, name: value} for i in range(200)]
        replies = asyncio.run(engine.generate({"input_ids": [[30, 31]] * 200, "sampling_params": params}))
        assert {r["output_ids"][0] for r in replies} == tokens


def test_penalties_and_minimum_length(models, open_engine):
    engine = open_engine(models("qwen3"))
    plain = ask(engine, [[40]], temperature=0, max_new_tokens=40, ignore_eos=True)[0]["output_ids"]
    assert max(plain.count(t) for t in plain) > 2, "the model must repeat itself for this test to mean something"
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 2.0)):
        said = ask(engine, [[40]], temperature=0, max_new_tokens=40, ignore_eos=True, **{name: value})[0]["output_ids"]
        assert len(set(said)) > len(set(plain))
    stop = plain[2]
    first = plain.index(stop) + 1
    assert len(ask(engine, [[40]], temperature=0, stop_token_ids=[stop])[0]["output_ids"]) == first
    longer = ask(engine, [[40]], temperature=0, max_new_tokens=9, min_new_tokens=9, stop_token_ids=[stop])[0]
    assert stop not in longer["output_ids"][:8] and len(longer["output_ids"]) == 9


def test_bfloat16_is_close(models, open_engine):
    folder = models("qwen3")
    engine = open_engine(folder, dtype="bfloat16")
    reply = ask(engine, [list(range(20, 40))], max_new_tokens=20, sampling_seed=1, ignore_eos=True)[0]
    ids, log_probs = bits(reply)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([list(range(20, 40)) + ids])).logits[0]
    expected = logits.log_softmax(-1)[19:-1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    gap = (torch.tensor(log_probs) - expected).abs()
    assert 1e-5 < gap.mean() < 0.05


def test_memory_that_is_not_to_be_had_is_told_with_its_size():
    with pytest.raises(SlimeError, match=r"of 1000000000 answers of 1000000 tokens are not to be had") as error:
        KVCache((2, 10**9, 2, 10**6, 16), torch.float32, torch.device("cpu"))
    assert "engine.slots" in error.value.fix
