"""Interrupted answers on the embedded engine: each token keeps the log-prob that it was said with."""

import asyncio
import random

import pytest
import torch

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.recipe import load_recipe
from slimecli.rollout.answering import Answering
from slimecli.rollout.args import HookArgs
from slimecli.rollout.collect import RolloutCollector
from slimecli.rollout.generate import Generator
from slimecli.rollout.source import PromptSource
from slimecli.types import Sample, SampleStatus
from tests.models import tiny_model
from tests.rollout.pieces import reward

WORDS = (
    "rollout.batch_size=3",
    "rollout.n_samples_per_prompt=2",
    "rollout.partial=true",
    "rollout.over_sampling_batch_size=8",
    "rollout.max_response_tokens=60",
)
ENDS = list(range(3, 20))
"""stop tokens: answers of a random model end after some twenty tokens, each at another time"""


def log_probs(model, sample):
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0].float()
    said = torch.log_softmax(logits[sample.prompt_length - 1 : -1], dim=-1)
    return said.gather(1, torch.tensor(sample.tokens[sample.prompt_length :])[:, None])[:, 0]


def test_a_continued_answer_has_the_log_probs_of_its_tokens(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(tmp_path / "m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    draw, recipe = random.Random(1), load_recipe("", WORDS)
    rows = [Sample(prompt="p", tokens=[draw.randrange(20, 300) for _ in range(6)]) for _ in range(40)]
    source = PromptSource(rows, 2, seed=0, shuffle=False)

    async def work():
        engine = EmbeddedEngine(folder, slots=16, max_context=80)
        generator = Generator(
            engine=engine,
            reward=reward,
            args=HookArgs(recipe),
            timeout_s=30.0,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        collector = RolloutCollector(recipe, source, Answering(recipe, generator, ENDS, None))
        try:
            return [s for step in range(1, 6) for g in (await collector.collect(step)).groups for s in g]
        finally:
            await engine.close()

    samples = asyncio.run(work())
    continued = [s for s in samples if len(s.version_spans) > 1]
    assert continued, "nothing was interrupted: this tests nothing"
    for sample in continued:
        assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) and sample.response_length <= 60
        assert sample.rollout_log_probs == pytest.approx(log_probs(model, sample).tolist(), abs=2e-4)
        assert sample.response == tokenizer.decode(sample.tokens[6:], skip_special_tokens=True)
        assert [end for _, _, end in sample.version_spans[:-1]] == [start for _, start, _ in sample.version_spans[1:]]
