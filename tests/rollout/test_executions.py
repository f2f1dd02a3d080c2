"""Several samples of one execution: rewards, advantages, loss weights, optimizer steps, and the record."""

import asyncio

import pytest
import torch

from slimecli.algos import algorithm
from slimecli.batch import from_groups, split_steps, weigh
from slimecli.data_tools.filters import load_filter
from slimecli.errors import DataError, SlimeError
from slimecli.recipe_algo import AlgoSection
from slimecli.rollout.collect import rollout_metrics
from slimecli.rollout.executions import executions, scores, seconds_outside, share_rewards
from slimecli.rollout.generate import Generator
from slimecli.rollout.versions import as_prompts
from slimecli.samples import decode_samples, encode_samples
from slimecli.types import Sample, SampleStatus


def part(group, index, length, *, rollout_id=None, reward=None, **metadata) -> Sample:
    return Sample(
        group_index=group,
        index=index,
        rollout_id=rollout_id,
        tokens=[1, 2, *range(10, 10 + length)],
        response_length=length,
        rollout_log_probs=[-1.0] * length,
        reward=reward,
        status=SampleStatus.COMPLETED,
        metadata=metadata,
    )


def test_a_cut_execution_has_the_weight_and_advantage_of_a_whole_one():
    """One answer of 6 tokens, whole or in two samples of 4 and 2: the same gradient in sum."""
    section = AlgoSection(name="grpo")
    whole = [[part(0, 0, 6, rollout_id=0, reward=1.0), part(0, 1, 3, rollout_id=1, reward=0.0)]]
    cut = [
        [
            part(0, 0, 4, rollout_id=0, reward=1.0),
            part(0, 0, 2, rollout_id=0, reward=1.0),
            part(0, 1, 3, rollout_id=1, reward=0.0),
        ]
    ]
    sums = []
    for groups in (whole, cut):
        batch = from_groups(groups, temperature=1.0)
        batch = weigh(batch.replace(advantages=algorithm("grpo").advantages(batch, section)), "sample")
        pull = batch.loss_weight * batch.advantages
        ids = torch.repeat_interleave(batch.rollout_ids, batch.lengths)
        sums.append([float(pull[ids == i].sum()) for i in (0, 1)])
        assert float(batch.loss_weight.sum()) == pytest.approx(1.0)
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0][0] > 0 > sums[0][1]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_cut_execution_pays_for_the_kl_of_all_its_samples(name):
    """Nine tokens 1 nat off the reference, six of them said by the execution that is cut in two."""
    section = AlgoSection(name=name, kl_coef=0.1, kl_place="reward", kl_type="k1", std_normalization=False)
    found = []
    for lengths in ((6,), (4, 2)):
        cut = [part(0, 0, n, rollout_id=0, reward=1.0) for n in lengths]
        batch = from_groups([[*cut, part(0, 1, 3, rollout_id=1, reward=0.0)]], temperature=1.0)
        batch = batch.replace(old_log_probs=-1.0 * batch.loss_mask, ref_log_probs=-2.0 * batch.loss_mask)
        advantages = algorithm(name).advantages(batch, section)
        ids = torch.repeat_interleave(batch.rollout_ids, batch.lengths)
        found.append([set(advantages[(ids == i) & (batch.loss_mask > 0)].tolist()) for i in (0, 1)])
    assert found[0] == found[1]
    (of_the_cut,), _ = found[0]  # 1 - 0.6 against 0 - 0.3: apart by 0.7
    assert of_the_cut == pytest.approx(0.35 if name == "grpo" else 0.7)


def test_an_execution_is_never_split_over_optimizer_steps():
    rows = [part(0, 0, 2, rollout_id=0, reward=1.0)] * 3 + [part(0, 1, 2, rollout_id=1, reward=0.0)]
    first, second = split_steps(from_groups([rows], temperature=1.0), 2)
    assert first.rollout_ids.tolist() == [0, 0, 0]
    assert second.rollout_ids.tolist() == [1]


def test_one_rollout_id_in_two_groups_is_refused():
    groups = [[part(0, 0, 2, rollout_id=5, reward=1.0)], [part(1, 1, 2, rollout_id=5, reward=1.0)]]
    with pytest.raises(DataError, match="rollout_id 5 stands in the groups 0 and 1"):
        from_groups(groups, temperature=1.0)


def test_executions_in_order():
    a, b, c, d = (part(0, i, 1, rollout_id=r) for i, r in enumerate([7, None, 7, None]))
    assert [[s.index for s in e] for e in executions([a, b, c, d])] == [[0, 2], [1], [3]]


def fan_out(metadata):
    """A generate function that cuts its execution into as many samples as `metadata` has."""

    async def generate(args, sample, sampling_params):
        return [part(sample.group_index, sample.index, i + 1, **m) for i, m in enumerate(metadata)]

    return generate


def run(generate, reward, n=2, **kwargs):
    pending = [Sample(group_index=0, index=i, tokens=[1, 2]) for i in range(n)]
    generator = Generator(engine=None, reward=reward, args=None, timeout_s=5, custom=generate, **kwargs)
    return asyncio.run(generator.group(pending, [{}] * n))


def test_segments_share_the_reward_of_the_last():
    scored = []

    async def reward(args, sample, **kwargs):
        scored.append(sample.response_length)
        return {"score": float(sample.index), "other": 2.0}

    done = run(fan_out([{"segment": 0, "segments": 2}, {"segment": 1, "segments": 2}]), reward)
    assert scored == [2, 2]
    assert [(s.rollout_id, s.reward["score"]) for s in done] == [(0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0)]
    assert done[0].reward is not done[1].reward
    assert load_filter("zero-variance")(None, done).keep


def test_segments_share_a_failed_reward():
    async def reward(args, sample, **kwargs):
        raise SlimeError("no score")

    done = run(fan_out([{"segment": 0, "segments": 2}, {"segment": 1, "segments": 2}]), reward, n=1)
    assert [s.status for s in done] == [SampleStatus.FAILED] * 2
    assert done[0].metadata["failure"] == "reward: no score"


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "it returned a NoneType"),
        ([{"text": "x"}], "it returned a dict"),
        ([], "it returned no sample"),
        (Sample(index=0), "it left the sample pending"),
        (
            Sample(index=0, tokens=[1, 2], response_length=1, loss_mask=[1, 1], status=SampleStatus.COMPLETED),
            "loss_mask",
        ),
    ],
)
def test_a_generate_function_that_returns_what_cannot_be_used_fails_its_sample_alone(returned, reason, partial):
    async def generate(args, sample, sampling_params):
        return returned if sample.index == 0 else part(0, sample.index, 1, reward=1.0)

    first, second = run(generate, None, partial=partial)
    assert first.status is SampleStatus.FAILED and first.reward is None
    assert first.metadata["failure"].startswith("custom generate: ") and reason in first.metadata["failure"]
    assert (second.status, second.reward) == (SampleStatus.COMPLETED, 1.0)


def test_agents_are_each_scored_and_own_rewards_kept():
    async def reward(args, sample, **kwargs):
        return float(sample.response_length)

    done = run(fan_out([{"agent": "solver"}, {"agent": "critic"}]), reward, n=1)
    assert [s.reward for s in done] == [1.0, 2.0]
    done[0].reward = 9.0
    share_rewards(done)
    assert [s.reward for s in done] == [9.0, 2.0]


def test_group_rewards_see_one_sample_per_conversation():
    async def reward(args, samples, **kwargs):
        return [float(len(samples))] * len(samples)

    done = run(fan_out([{"segment": 0, "segments": 2}, {"segment": 1, "segments": 2}]), reward, n=3, group_reward=True)
    assert [s.reward for s in done] == [3.0] * 6


def test_fan_out_survives_the_record_and_begins_anew_as_its_prompt():
    async def reward(args, sample, **kwargs):
        return 1.0

    done = run(fan_out([{"segment": 0, "segments": 2}, {"segment": 1, "segments": 2}]), reward)
    (again,) = decode_samples(encode_samples([done]), "x")
    assert again == done
    begun = as_prompts(again)
    assert [(s.index, s.tokens, s.status) for s in begun] == [(i, [1, 2], SampleStatus.PENDING) for i in (0, 1)]


def test_metrics_count_executions_once():
    cut = [part(0, 0, 2, rollout_id=0, reward=1.0)] * 3 + [part(0, 1, 2, rollout_id=1, reward=0.0)]
    cut[2] = part(0, 0, 2, rollout_id=0, reward=1.0, stats={"turns": 4.0, "tool_errors": 1})
    cut[3] = part(0, 1, 2, rollout_id=1, reward=0.0, stats={"turns": 2.0})
    failed = part(0, 2, 2, rollout_id=2)
    failed.status = SampleStatus.FAILED
    assert scores([*cut, failed], None) == [1.0, 0.0]
    found = rollout_metrics([[*cut, failed]], None)
    assert (found["rollout/reward"], found["rollout/accuracy"]) == (0.5, 0.5)
    assert (found["rollout/stats/turns"], found["rollout/stats/tool_errors"]) == (3.0, 1.0)
    assert found["rollout/zero_variance_fraction"] == 0.0


def test_a_generate_function_is_told_of_evaluation_if_it_asks():
    seen = []

    async def asks(args, sample, sampling_params, evaluation=False):
        seen.append(evaluation)
        return part(0, sample.index, 1, reward=1.0)

    run(asks, None, n=1)
    run(asks, None, n=1, evaluation=True)
    assert seen == [False, True]


def test_seconds_outside_are_those_of_executions():
    group = [part(0, 0, 2, rollout_id=0), part(0, 1, 2, rollout_id=0), part(0, 2, 2, rollout_id=2), part(0, 3, 2)]
    assert seconds_outside(group) == {}
    for sample, seconds in zip(group, (0.5, 1.0, 3.0, 0.0), strict=True):
        sample.non_generation_time = seconds
    assert seconds_outside(group) == {"non_generation_mean": 1.5, "non_generation_max": 3.0}
    assert Sample.from_dict({"non_generation_time": 2.0}).non_generation_time == 2.0
    assert group[0].copies(1)[0].non_generation_time == 0.0
