"""Log-probs under penalties, biases and cuts, against the same numbers from transformers' logits."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimecli.engines.embedded.engine import EmbeddedEngine

PROMPT = [40, 40, 41]


@pytest.fixture(scope="module")
def sides(models):
    engine = EmbeddedEngine(models("qwen3"), slots=4, max_context=128)
    yield engine, AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32)
    asyncio.run(engine.close())


def said_and_logits(sides, **sampling):
    """An answer's tokens and log-probs, and transformers' raw logits at the same places."""
    engine, reference = sides
    params = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 5, **sampling}
    payload = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    reply = asyncio.run(engine.generate(payload))
    ids = reply["output_ids"]
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    return ids, torch.tensor([p for p, _, _ in reply["meta_info"]["output_token_logprobs"]]), logits


def assert_same(given, ids, logits):
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties(sides, name, temperature):
    """OpenAI's frequency and presence penalty, CTRL's repetition penalty, over what the answer has said so far."""
    value = 1.5
    liked = {"7": 6.0, "9": 6.0}
    ids, given, logits = said_and_logits(sides, temperature=temperature, logit_bias=liked, **{name: value})
    assert max(ids.count(7), ids.count(9)) > 2, "hardly anything was said twice: this tests nothing"
    for i in range(len(ids)):
        counts = torch.bincount(torch.tensor(ids[:i], dtype=torch.int64), minlength=logits.shape[1])
        if name == "repetition_penalty":
            divided = torch.where(logits[i] > 0, logits[i] / value, logits[i] * value)
            logits[i] = torch.where(counts > 0, divided, logits[i])
        else:
            logits[i] -= value * (counts if name == "frequency_penalty" else counts.clamp(max=1))
    logits[:, [7, 9]] += 6.0
    assert_same(given, ids, logits / temperature)


def test_logit_bias(sides):
    ids, given, logits = said_and_logits(sides, logit_bias={"7": 9.0, "8": -2.5})
    assert ids.count(7) > 5
    logits[:, 7] += 9.0
    logits[:, 8] -= 2.5
    assert_same(given, ids, logits)


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_log_probs_are_those_before_the_cut(sides, cut):
    """As SGLang reports them, and as the trainer recomputes them; what lies outside the cut is never said."""
    ids, given, logits = said_and_logits(sides, temperature=0.8, **cut)
    assert_same(given, ids, logits / 0.8)
    p = (logits / 0.8).softmax(-1)
    own = p.gather(-1, torch.tensor(ids)[:, None])
    likelier = p > own
    if "top_k" in cut:
        assert (likelier.sum(-1) < 4).all()
    elif "top_p" in cut:
        assert ((p * likelier).sum(-1) < 0.6 + 1e-5).all()
    else:
        assert (own[:, 0] >= 0.2 * p.max(-1).values - 1e-6).all()


def test_no_end_before_the_minimum(sides):
    """The end token is ruled out, and the log-probs are of the distribution without it."""
    params = {"min_new_tokens": 10, "max_new_tokens": 12, "ignore_eos": False, "logit_bias": {"2": 20.0}}
    ids, given, logits = said_and_logits(sides, **params)
    assert len(ids) == 11 and ids[-1] == 2 and 2 not in ids[:-1]
    logits[:, 2] += 20.0
    logits[:10, 2] = float("-inf")
    assert_same(given, ids, logits)
