import asyncio

import pytest

from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rollout.answering import Answering
from slimecli.rollout.args import HookArgs
from slimecli.rollout.collect import Collection, RolloutCollector
from slimecli.rollout.generate import Generator
from slimecli.rollout.source import PromptSource
from slimecli.seeds import derive_seed
from slimecli.types import Sample, SampleStatus
from tests.rollout.fakes import ScriptedEngine


async def reward(args, sample, **kwargs):
    return float(sample.tokens[-1] % 2)


def seeded(ids, params):
    return [ids[0], params["sampling_seed"] % 50]


def setup(engine=None, *, keep=None, sets=(), reward_fn=reward, custom=None, timeout_s=5.0):
    recipe = load_recipe("", ("rollout.batch_size=4", "rollout.n_samples_per_prompt=2", *sets))
    source = PromptSource([Sample(prompt=f"p{i}", tokens=[i]) for i in range(32)], 2, seed=recipe.seed, shuffle=True)
    generator = Generator(
        engine=engine or ScriptedEngine(seeded),
        reward=reward_fn,
        args=HookArgs(recipe),
        timeout_s=timeout_s,
        group_reward=recipe.reward.group,
        custom=custom,
    )
    return RolloutCollector(recipe, source, Answering(recipe, generator, [2], keep)), source, generator


def test_samples_are_complete_and_carry_what_was_sent():
    collector, _, _ = setup()
    result = asyncio.run(collector.collect(3))
    sample = result.groups[0][1]
    assert len(result.groups) == 4 and all(len(g) == 2 for g in result.groups)
    assert sample.status is SampleStatus.COMPLETED and sample.response_length == 2
    assert sample.rollout_log_probs == [-0.5, -0.5] and sample.weight_versions == ["3"]
    assert sample.sampling["temperature"] == 1.0 and sample.sampling["stop_token_ids"] == [2]


def test_seeds_differ_within_a_group_and_by_step_and_repeat_by_run():
    def seeds(step):
        collector, _, _ = setup()
        return [s.sampling["sampling_seed"] for g in asyncio.run(collector.collect(step)).groups for s in g]

    assert len(set(seeds(1))) == 8
    assert seeds(1) == seeds(1) != seeds(2)


def test_groups_are_taken_in_prompt_order_however_they_finish():
    async def slow_first(args, sample, sampling_params):
        await asyncio.sleep(0.03 if sample.group_index == 0 else 0.0)
        sample.tokens, sample.response_length = [*sample.tokens, 7], 1
        sample.status = SampleStatus.COMPLETED
        return sample

    collector, _, _ = setup(custom=slow_first)
    result = asyncio.run(collector.collect(1))
    assert [g[0].group_index for g in result.groups] == [0, 1, 2, 3]


def test_filter_draws_until_full_and_gives_back_what_comes_after_the_last_accepted_group():
    def keep(args, samples, **kwargs):
        return samples[0].group_index % 2 == 1

    collector, source, _ = setup(keep=keep, sets=("rollout.over_sampling_batch_size=12",))
    result = asyncio.run(collector.collect(1))
    assert [g[0].group_index for g in result.groups] == [1, 3, 5, 7]
    assert [g[0].group_index for g in source.take(3)] == [8, 9, 10]
    assert result.metrics["rollout/dropped/filter"] == 4.0 and result.metrics["rollout/surplus"] == 4.0


def test_surplus_comes_next_with_answers_of_its_own_step():
    collector, source, _ = setup(keep=lambda args, samples: True, sets=("rollout.over_sampling_batch_size=8",))
    asyncio.run(collector.collect(1))
    waiting = source.state()["buffer"]
    assert [g[0]["group_index"] for g in waiting] == [4, 5, 6, 7]
    assert all(s["status"] == "pending" and "rollout_log_probs" not in s for g in waiting for s in g)
    groups = asyncio.run(collector.collect(2)).groups
    assert [g[0].group_index for g in groups] == [4, 5, 6, 7]
    step_2 = [derive_seed(load_recipe("").seed, "rollout", 2, g, i) for g in (4, 5, 6, 7) for i in range(2)]
    assert [s.sampling["sampling_seed"] for g in groups for s in g] == step_2


def test_starving_filter_is_an_error_that_names_it():
    collector, _, _ = setup(
        keep=lambda args, samples: False, sets=("rollout.max_filtered_rounds=3", "rollout.dynamic_filter='mine:f'")
    )
    with pytest.raises(SlimeError, match="0 of 4 groups.*mine:f"):
        asyncio.run(collector.collect(1))


def failing_reward(bad_group):
    async def fn(args, sample, **kwargs):
        if sample.group_index == bad_group:
            raise SlimeError("scorer said no", "mend it")
        return 1.0

    return fn


def test_one_failed_group_is_counted_and_replaced():
    collector, _, _ = setup(reward_fn=failing_reward(1), sets=("rollout.max_failed_fraction=0.5",))
    result = asyncio.run(collector.collect(1))
    assert [g[0].group_index for g in result.groups] == [0, 2, 3, 4]
    assert result.metrics["rollout/dropped/failed"] == 1.0 and result.metrics["rollout/failed"] == 2.0
    assert result.metrics["rollout/reward_failed"] == 2.0


def test_named_scores_are_told_apart_in_the_metrics():
    async def named(args, sample, **kwargs):
        return {"score": 0.5, "format": float(sample.group_index == 1)}

    collector, _, _ = setup(reward_fn=named)
    metrics = asyncio.run(collector.collect(1)).metrics
    assert metrics["rollout/reward"] == metrics["rollout/reward/score"] == 0.5
    assert metrics["rollout/reward/format"] == 0.25 and metrics["rollout/reward_failed"] == 0.0


def test_too_many_failures_are_an_error_with_the_first_cause():
    async def broken(args, sample, **kwargs):
        raise SlimeError("scorer said no", "mend it")

    collector, _, _ = setup(reward_fn=broken)
    with pytest.raises(SlimeError, match="8 of 8 answers failed.*scorer said no"):
        asyncio.run(collector.collect(1))


def test_an_answer_that_the_engine_aborted_has_failed():
    class Aborting(ScriptedEngine):
        def _reply(self, ids, params):
            reply = super()._reply(ids, params)
            if ids[0] % 2:
                reply["meta_info"]["finish_reason"] = {"type": "abort"}
            return reply

    collector, _, _ = setup(Aborting(seeded), sets=("rollout.max_failed_fraction=1",))
    samples = [s for g in asyncio.run(collector.collect(1)).groups for s in g]
    assert {s.status for s in samples} == {SampleStatus.COMPLETED}, "groups without any answer are replaced"
    collector, _, _ = setup(Aborting(seeded))
    with pytest.raises(SlimeError, match="the engine aborted the answer"):
        asyncio.run(collector.collect(1))


def test_a_custom_generate_may_give_up_without_a_reason():
    async def give_up(args, sample, sampling_params):
        sample.status = SampleStatus.FAILED
        return sample

    collector, _, _ = setup(custom=give_up)
    with pytest.raises(SlimeError, match="8 of 8 answers failed.*status `failed`"):
        asyncio.run(collector.collect(1))


def test_dead_engine_is_named():
    collector, _, _ = setup(
        ScriptedEngine(seeded, fail_on=0), sets=("rollout.batch_size=32", "rollout.max_failed_fraction=0")
    )
    with pytest.raises(SlimeError, match="engine 0 died"):
        asyncio.run(collector.collect(1))


def test_hanging_engine_meets_its_deadline():
    class Hanging(ScriptedEngine):
        async def generate(self, payload):
            await asyncio.sleep(60 if payload["input_ids"][0][0] == 0 else 0)
            return await super().generate(payload)

    words = ("rollout.batch_size=32", "rollout.max_failed_fraction=0.1")
    collector, _, _ = setup(Hanging(seeded), sets=words, timeout_s=0.3)
    collection = asyncio.run(asyncio.wait_for(collector.collect(1), 30))
    assert collection.metrics["rollout/failed"] == 2 and len(collection.groups) == 32


def test_hanging_custom_generate_meets_its_deadline():
    async def hang(args, sample, sampling_params):
        await asyncio.sleep(60)

    collector, _, _ = setup(custom=hang, timeout_s=0.05)
    with pytest.raises(SlimeError, match="custom generate: TimeoutError: no answer within"):
        asyncio.run(collector.collect(1))


def test_fan_out_shares_the_rollout_id():
    async def twice(args, sample, sampling_params):
        parts = []
        for turn in range(2):
            part = Sample.from_dict(sample.to_dict())
            part.tokens, part.response_length = [*sample.tokens, turn], 1
            part.status = SampleStatus.COMPLETED
            parts.append(part)
        return parts

    collector, _, _ = setup(custom=twice)
    group = asyncio.run(collector.collect(1)).groups[0]
    assert len(group) == 4
    assert [s.rollout_id for s in group] == [group[0].index, group[0].index, group[2].index, group[2].index]


def test_group_reward_scores_all_at_once():
    seen = []

    async def rank(args, samples, **kwargs):
        seen.append(len(samples))
        return [float(i) for i in range(len(samples))]

    collector, _, _ = setup(reward_fn=rank, sets=("reward.group=true",))
    result = asyncio.run(collector.collect(1))
    assert seen == [2, 2, 2, 2]
    assert [s.reward for s in result.groups[0]] == [0.0, 1.0]


def test_group_reward_of_the_wrong_length_is_a_failure():
    async def short(args, samples, **kwargs):
        return [1.0]

    collector, _, _ = setup(reward_fn=short, sets=("reward.group=true",))
    with pytest.raises(SlimeError, match="1 scores for 2 samples"):
        asyncio.run(collector.collect(1))


def test_hook_arguments_are_read_only_and_name_the_nearest():
    args = HookArgs(load_recipe("", ("rollout.batch_size=4",)))
    assert args.rollout_batch_size == 4 and args.advantage_estimator == "grpo"
    with pytest.raises(AttributeError, match="rollout_batch_size"):
        _ = args.rollout_batch_sizee
    with pytest.raises(SlimeError, match="read-only|tried to set"):
        args.lr = 1.0


def test_a_collection_is_told_without_its_samples():
    """asyncio.Runner makes the repr of every result, and that of a batch takes longer than a step may."""
    told = repr(Collection(groups=[[Sample()]], metrics={"x": 1.0}))
    assert "'x': 1.0" in told and "Sample" not in told
