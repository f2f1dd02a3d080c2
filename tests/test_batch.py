"""TrainBatch: alignment, weights, splitting, micro-batch plans."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from slimecli.batch import TrainBatch, from_groups, plan_micro_batches, split_steps, weigh
from slimecli.errors import DataError, UsageError
from slimecli.types import Sample, SampleStatus


def sample(prompt, answer, **fields):
    fields = {"reward": 1.0, "status": SampleStatus.COMPLETED, **fields}
    return Sample(tokens=[*prompt, *answer], response_length=len(answer), **fields)


def test_masks_and_log_probs_stand_one_before_their_token():
    a = sample([7, 8], [9, 10, 2], loss_mask=[1, 0, 1], rollout_log_probs=[-0.1, -9.0, -0.3], group_index=4)
    b = sample([5], [6], rollout_log_probs=[-0.5], group_index=4, reward=0.0, rollout_id=3)
    batch = from_groups([[a, b]], temperature=0.5)
    assert batch.tokens.tolist() == [7, 8, 9, 10, 2, 5, 6]
    assert batch.targets.tolist() == [8, 9, 10, 2, 0, 6, 0]
    assert batch.loss_mask.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert torch.allclose(batch.rollout_log_probs, torch.tensor([0, -0.1, 0, -0.3, 0, -0.5, 0]))
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.group_ids.tolist() == [4, 4]
    assert batch.rollout_ids.tolist() == [-1, 3]
    assert batch.rewards.tolist() == [1, 0]
    assert (batch.num_samples, batch.num_tokens, batch.temperature) == (2, 7, 0.5)


def test_samples_without_ids_get_their_own():
    batch = from_groups([[sample([1], [2]), sample([1], [3])], [sample([4], [5])]], temperature=1.0)
    assert batch.group_ids[0] == batch.group_ids[1] != batch.group_ids[2]
    assert len(set(batch.rollout_ids.tolist())) == 3


def test_failed_and_aborted_samples_are_left_out():
    bad = [Sample(tokens=[1, 2], response_length=1, status=s) for s in (SampleStatus.FAILED, SampleStatus.ABORTED)]
    batch = from_groups([[*bad, sample([1], [2])]], temperature=1.0)
    assert batch.num_samples == 1
    with pytest.raises(DataError, match="no sample to train on"):
        from_groups([bad], temperature=1.0)


def test_removed_samples_keep_their_reward_but_no_mask():
    batch = from_groups([[sample([1], [2, 3], remove_sample=True), sample([1], [4])]], temperature=1.0)
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 0]
    assert batch.rewards.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (sample([1], [2, 3], loss_mask=[1]), "loss_mask has 1 entries for 2"),
        (sample([], [2, 3], index=5), "sample 5 has no prompt token"),
        (sample([1], [2], rollout_log_probs=[float("nan")]), "NaN"),
        (sample([1], [2], reward=None), "without a reward"),
    ],
)
def test_broken_samples_are_named(broken, said):
    with pytest.raises(DataError, match=said):
        from_groups([[broken]], temperature=1.0)


def test_log_probs_for_some_samples_only_is_an_error():
    with pytest.raises(DataError, match="sample 8 has no rollout_log_probs"):
        from_groups([[sample([1], [2], rollout_log_probs=[-1.0]), sample([1], [2], index=8)]], temperature=1.0)


def test_greedy_sampling_cannot_be_trained():
    with pytest.raises(UsageError, match="temperature 0"):
        from_groups([[sample([1], [2])]], temperature=0.0)


def test_named_rewards():
    batch = from_groups([[sample([1], [2], reward={"a": 1.0, "b": 0.25})]], temperature=1.0, reward_key="b")
    assert batch.rewards.tolist() == [0.25]


def two_executions() -> TrainBatch:
    """Execution 1: samples of 3 and 1 trained tokens; execution 2: one of 2."""
    rows = [sample([1], [1, 2, 3], rollout_id=1), sample([1], [4], rollout_id=1), sample([1], [5, 6], rollout_id=2)]
    return from_groups([rows], temperature=1.0)


def trained(batch: TrainBatch) -> list[float]:
    return [round(x, 6) for x in batch.loss_weight[batch.loss_mask > 0].tolist()]


def test_weights_per_sample_share_the_denominator_of_an_execution():
    assert trained(weigh(two_executions(), "sample")) == [0.125] * 4 + [0.25] * 2


def test_weights_per_token():
    assert trained(weigh(two_executions(), "token")) == [round(1 / 6, 6)] * 6


def test_weights_with_a_constant_denominator():
    assert trained(weigh(two_executions(), "constant", 8)) == [round(1 / 16, 6)] * 6
    with pytest.raises(UsageError, match="constant_length"):
        weigh(two_executions(), "constant", 0)


def test_an_execution_without_trained_tokens_counts_in_the_mean():
    rows = [sample([1], [2, 3]), sample([1], [4], remove_sample=True)]
    assert trained(weigh(from_groups([rows], temperature=1.0), "sample")) == [0.25, 0.25]


def test_select_keeps_samples_whole_and_in_the_order_given():
    batch = weigh(two_executions(), "sample").replace(advantages=torch.arange(9.0))
    part = batch.select([2, 0])
    assert part.tokens.tolist() == [1, 5, 6, 1, 1, 2, 3]
    assert part.cu_seqlens.tolist() == [0, 3, 7]
    assert part.advantages.tolist() == [6, 7, 8, 0, 1, 2, 3]
    assert part.rollout_ids.tolist() == [2, 1]
    assert part.rollout_log_probs is None
    assert part.loss_weight.sum() == pytest.approx(0.5 + 3 / 8)


def test_numpy_round_trip():
    batch = weigh(two_executions(), "sample").replace(old_log_probs=torch.randn(9))
    again = TrainBatch.from_numpy(batch.to_numpy())
    assert again.temperature == batch.temperature
    assert again.ref_log_probs is None
    for name in (
        "tokens",
        "cu_seqlens",
        "targets",
        "loss_mask",
        "loss_weight",
        "old_log_probs",
        "rewards",
        "group_ids",
    ):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
        assert getattr(again, name).dtype == getattr(batch, name).dtype


def test_steps_take_whole_executions_in_order():
    parts = split_steps(two_executions(), 2)
    assert [p.rollout_ids.tolist() for p in parts] == [[1, 1], [2]]
    many = from_groups([[sample([1], [i]) for i in range(7)]], temperature=1.0)
    parts = split_steps(many, 3)
    assert [p.num_samples for p in parts] == [3, 2, 2]
    assert torch.cat([p.tokens for p in parts]).equal(many.tokens)
    with pytest.raises(DataError, match="2 answers cannot be split over 3"):
        split_steps(two_executions(), 3)


def test_plan_keeps_order_and_budget():
    assert plan_micro_batches([5, 5, 4, 6], max_tokens=10, ranks=2) == [[[0, 1]], [[2, 3]]]
    assert plan_micro_batches([5, 5, 4, 6], max_tokens=100, ranks=1) == [[[0, 1, 2, 3]]]
    assert plan_micro_batches([3, 50, 3], max_tokens=10, ranks=1) == [[[0], [1], [2]]]


def test_plan_with_fewer_samples_than_bins_leaves_empty_ones():
    assert plan_micro_batches([4], max_tokens=10, ranks=2) == [[[0]], [[]]]
    assert sorted(map(len, plan_micro_batches([9, 9, 9], max_tokens=10, ranks=2))) == [2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_plan_properties(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 80))]
    budget, ranks = rng.randint(20, 200), rng.choice([1, 2, 3, 4, 8])
    plan = plan_micro_batches(lengths, budget, ranks)
    assert plan == plan_micro_batches(lengths, budget, ranks)
    assert len(plan) == ranks
    assert len({len(bins) for bins in plan}) == 1
    flat = [i for bins in plan for one in bins for i in one]
    assert sorted(flat) == list(range(len(lengths)))
    for one in itertools.chain.from_iterable(plan):
        assert len(one) <= 1 or sum(lengths[i] for i in one) <= budget
        assert one == list(range(one[0], one[0] + len(one))) if one else True
