import asyncio
import itertools

import pytest

from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rollout.args import HookArgs
from slimecli.rollout.evaluate import EvalSet, evaluate, pass_at_k
from slimecli.rollout.generate import Generator
from slimecli.types import Sample
from tests.rollout.fakes import ScriptedEngine


async def is_even(args, sample, **kwargs):
    return float(sample.tokens[-1] % 2 == 0)


def run(recipe, answer, reward=is_even, greedy=False):
    generator = Generator(engine=ScriptedEngine(answer), reward=reward, args=HookArgs(recipe), timeout_s=5.0)
    sets = [EvalSet(name="holdout", rows=[Sample(prompt=f"p{i}", tokens=[i], label="x") for i in range(6)])]
    return asyncio.run(evaluate(recipe, generator, sets, [2], greedy=greedy))["holdout"]


def test_pass_at_k_is_the_exact_chance_over_all_subsets():
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    for k, value in pass_at_k([scores]).items():
        subsets = list(itertools.combinations(scores, k))
        assert value == pytest.approx(sum(max(s) for s in subsets) / len(subsets))


def test_mean_and_error():
    result = run(load_recipe("", ("eval.n_samples_per_prompt=2",)), lambda ids, p: [ids[0]])
    assert result["mean"] == 0.5 and result["n"] == 12 and result["prompts"] == 6
    assert result["stderr"] == pytest.approx((0.25 * 12 / 11 / 12) ** 0.5)


def test_greedy_sends_temperature_zero_and_one_answer():
    sent = []

    def answer(ids, params):
        sent.append(params)
        return [0]

    run(load_recipe("", ("eval.n_samples_per_prompt=4", "rollout.top_p=0.5")), answer, greedy=True)
    assert len(sent) == 6
    assert {p["temperature"] for p in sent} == {0.0} and {p["top_p"] for p in sent} == {1.0}


def test_spec_tells_settings_apart_but_not_answers():
    base = run(load_recipe(""), lambda ids, p: [0])["spec"]
    assert run(load_recipe(""), lambda ids, p: [1])["spec"] == base
    assert run(load_recipe("", ("eval.temperature=0.5",)), lambda ids, p: [0])["spec"] != base
    assert run(load_recipe("", ("reward.type='f1'",)), lambda ids, p: [0])["spec"] != base


def test_failed_answers_are_counted_not_scored():
    async def sometimes(args, sample, **kwargs):
        if sample.tokens[0] < 3:
            raise SlimeError("no", "")
        return 1.0

    tolerant = load_recipe("", ("rollout.max_failed_fraction=0.5",))
    result = run(tolerant, lambda ids, p: [0], reward=sometimes)
    assert result["failed"] == 3 and result["mean"] == 1.0 and result["n"] == 3
    with pytest.raises(SlimeError, match=r"3 of 6 answers failed \(allowed: 10%\).*no"):
        run(load_recipe(""), lambda ids, p: [0], reward=sometimes)


def test_no_more_answers_are_in_flight_than_the_recipe_says():
    flying, most = 0, 0

    async def slow(args, sample, **kwargs):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001)
        flying -= 1
        return 1.0

    run(load_recipe("", ("rollout.concurrency=4", "eval.n_samples_per_prompt=2")), lambda ids, p: [0], reward=slow)
    assert most == 4


def test_no_answer_at_all_is_an_error():
    async def never(args, sample, **kwargs):
        raise SlimeError("the judge is down", "")

    with pytest.raises(SlimeError, match="judge is down"):
        run(load_recipe(""), lambda ids, p: [0], reward=never)
