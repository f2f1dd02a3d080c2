import asyncio

import pytest

from slimecli.data_tools.rewards import load_reward
from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.recipe_rollout import EvalSetSection
from slimecli.rollout.args import HookArgs
from slimecli.rollout.eval_sets import EvalSet, set_recipe
from slimecli.rollout.eval_spec import differences, make_spec
from slimecli.rollout.evaluate import evaluate
from slimecli.rollout.generate import Generator
from slimecli.types import Sample, SampleStatus
from tests.rollout.fakes import ScriptedEngine


async def is_even(args, sample, **kwargs):
    return float(sample.tokens[-1] % 2 == 0)


def run(recipe, answer, reward=is_even, greedy=False, template="{{ x }}"):
    generator = Generator(engine=ScriptedEngine(answer), reward=reward, args=HookArgs(recipe), timeout_s=5.0)
    rows = [Sample(prompt=f"p{i}", tokens=[i], label="x") for i in range(6)]
    sets = [EvalSet(name="holdout", rows=rows, template=template)]
    return asyncio.run(evaluate(recipe, generator, sets, [2], greedy=greedy))["holdout"]


def test_mean_and_error():
    result = run(load_recipe("", ("eval.n_samples_per_prompt=2",)), lambda ids, p: [ids[0]])
    assert result["mean"] == 0.5 and result["n"] == 12 and result["prompts"] == 6
    assert result["stderr"] == pytest.approx((0.25 * 6 / 5 / 6) ** 0.5), "two equal answers to a prompt count once"
    assert result["samples_per_prompt"] == 2 and result["scores"] == [[1.0, 1.0], [0.0, 0.0]] * 3


def test_greedy_sends_temperature_zero_and_one_answer():
    sent = []

    def answer(ids, params):
        sent.append(params)
        return [0]

    run(load_recipe("", ("eval.n_samples_per_prompt=4", "rollout.top_p=0.5")), answer, greedy=True)
    assert len(sent) == 6
    assert {p["temperature"] for p in sent} == {0.0} and {p["top_p"] for p in sent} == {1.0}


def test_spec_tells_settings_apart_but_not_answers():
    base = run(load_recipe(""), lambda ids, p: [0])
    again = run(load_recipe(""), lambda ids, p: [1])
    assert again["spec"] == base["spec"] and again["spec_hash"] == base["spec_hash"]
    for change, field in (
        ("eval.temperature=0.5", "sampling.temperature"),
        ("eval.top_p=0.5", "sampling.top_p"),
        ("eval.seed=3", "seed"),
        ("eval.n_samples_per_prompt=2", "samples_per_prompt"),
        ("eval.max_prompts=3", "prompts.count"),
        ("reward.type='f1'", "scorer.type"),
    ):
        other = run(load_recipe("", (change,)), lambda ids, p: [0])
        assert other["spec_hash"] != base["spec_hash"]
        assert field in [name for name, _, _ in differences(base["spec"], other["spec"])]
    other = run(load_recipe(""), lambda ids, p: [0], template="{{ y }}")
    assert [name for name, _, _ in differences(base["spec"], other["spec"])] == ["template.chat"]
    assert run(load_recipe("", ("seed=5", "reward.timeout_s=9")), lambda ids, p: [0])["spec"] == base["spec"]


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


def test_a_set_may_differ_from_the_rest():
    """Its own answers per prompt, sampling and scorer; the others stay as they are, and all run at the same time."""
    recipe = load_recipe("", ("eval.n_samples_per_prompt=1", "reward.type='exact'"))
    settings = EvalSetSection(path="x.jsonl", n_samples_per_prompt=4, temperature=0.3, top_p=0.9, reward="regex")
    rows = [Sample(prompt=f"p{i}", tokens=[i], label="7") for i in range(3)]
    sets = [
        EvalSet(name="own", rows=rows, recipe=set_recipe(recipe, settings)),
        EvalSet(name="plain", rows=rows, recipe=set_recipe(recipe, EvalSetSection(path="x.jsonl"))),
    ]
    sent = []

    def answer(ids, params):
        sent.append(params)
        return [1, 7]

    generator = Generator(
        engine=ScriptedEngine(answer), reward=load_reward(recipe.reward), args=HookArgs(recipe), timeout_s=5.0
    )
    results = asyncio.run(evaluate(recipe, generator, sets, [2], greedy=False))
    assert results["own"]["mean"] == 1.0 and results["own"]["n"] == 12, "the pattern is found in '1 7'"
    assert results["plain"]["mean"] == 0.0 and results["plain"]["n"] == 3, "which is not exactly '7'"
    assert sorted({(p["temperature"], p["top_p"]) for p in sent}) == [(0.3, 0.9), (1.0, 1.0)]
    assert sorted(k for k in results["own"]["pass@k"]) == ["1", "2", "4"]


def test_a_set_with_its_own_scorer_scores_answers_one_by_one_beside_a_group_reward(tmp_path):
    """One answer that cannot be scored fails alone; a set may also be the only one that scores whole groups."""
    (tmp_path / "ranks.py").write_text("def ranks(args, samples): return [i / 2 for i, _ in enumerate(samples)]\n")
    (tmp_path / "own.py").write_text("def first(args, sample): return 1 / (len(sample.response) - 1)\n")
    ranks, own = f"{tmp_path}/ranks.py:ranks", f"{tmp_path}/own.py:first"
    sizes = iter([1, 2, 2])
    more = ("eval.n_samples_per_prompt=3", "rollout.max_failed_fraction=0.5")

    def results(recipe, settings):
        generator = Generator(
            engine=ScriptedEngine(lambda ids, params: [7] * next(sizes, 1)),
            reward=load_reward(recipe.reward),
            group_reward=recipe.reward.group,
            args=HookArgs(recipe),
            timeout_s=5.0,
        )
        item = EvalSet(name="x", rows=[Sample(prompt="p", tokens=[1])], recipe=set_recipe(recipe, settings))
        return asyncio.run(evaluate(recipe, generator, [item], [2], greedy=False))["x"]

    grouped = load_recipe("", (*more, f"reward.path='{ranks}'", "reward.group=true"))
    found = results(grouped, EvalSetSection(path="x.jsonl", reward=own))
    assert (found["failed"], found["n"]) == (1, 2), found
    assert results(grouped, EvalSetSection(path="x.jsonl"))["mean"] == 0.5
    single = load_recipe("", (*more, f"reward.path='{own}'"))
    assert results(single, EvalSetSection(path="x.jsonl", reward=ranks, reward_group=True))["mean"] == 0.5


def test_seeds_follow_the_prompts_place_and_not_the_set_name():
    sent = {}
    rows = [Sample(prompt="p", tokens=[1], label="x"), Sample(prompt="p", tokens=[2], label="x")]
    for name in ("a", "b"):
        seeds = sent.setdefault(name, [])
        engine = ScriptedEngine(lambda ids, p, seeds=seeds: seeds.append(p["sampling_seed"]) or [0])
        recipe = load_recipe("", (f"seed={len(sent)}", "eval.n_samples_per_prompt=2"))
        generator = Generator(engine=engine, reward=is_even, args=HookArgs(recipe), timeout_s=5.0)
        asyncio.run(evaluate(recipe, generator, [EvalSet(name=name, rows=rows)], [2], greedy=False))
    assert sent["a"] == sent["b"] and len(set(sent["a"])) == 4


def test_a_generate_function_is_a_part_of_what_was_measured():
    rows = [Sample(prompt="p", tokens=[1], label="x")]
    plain, loop = (load_recipe("", (f"rollout.custom_generate='{name}'",)) for name in ("", "tool_loop"))
    fewer = load_recipe("", ("rollout.custom_generate='tool_loop'", "tools.max_turns=2"))
    specs = [make_spec(rows, recipe, {}, 1, "") for recipe in (plain, loop, fewer)]
    assert specs[0]["generate"]["version"] == "" and len(specs[1]["generate"]["version"]) == 12
    assert [name for name, _, _ in differences(specs[1], specs[2])] == ["generate.tools.max_turns"]


def test_segments_of_one_execution_are_one_answer():
    """A generate function may cut an execution into several samples; it is one draw all the same."""

    async def in_two(args, sample, sampling_params):
        halves = sample.copies(2)
        for half in halves:
            half.status, half.rollout_id, half.reward = SampleStatus.COMPLETED, sample.index, float(sample.index % 2)
        return halves

    recipe = load_recipe("", ("eval.n_samples_per_prompt=2",))
    generator = Generator(
        engine=ScriptedEngine(lambda ids, p: [0]), reward=is_even, args=HookArgs(recipe), timeout_s=5.0, custom=in_two
    )
    sets = [EvalSet(name="s", rows=[Sample(prompt="p", tokens=[1])] * 3)]
    result = asyncio.run(evaluate(recipe, generator, sets, [2], greedy=False))["s"]
    assert result["scores"] == [[0.0, 1.0]] * 3 and result["n"] == 6 and list(result["pass@k"]) == ["1", "2"]
