from slimecli.recipe import load_recipe
from slimecli.rollout.versions import age, age_metrics, as_prompts, bounded, mask_before, oldest_version, stamp
from slimecli.types import Sample, SampleStatus


def spoken(*spans, index=0, **more):
    """An answer of prompt [7, 8]; spans are (version, tokens)."""
    told, at = [], 0
    for version, count in spans:
        told.append([str(version), at, at + count])
        at += count
    return Sample(
        group_index=3,
        index=index,
        prompt="p",
        tokens=[7, 8, *range(10, 10 + at)],
        response_length=at,
        rollout_log_probs=[-0.5] * at,
        weight_versions=[str(v) for v, _ in spans],
        version_spans=told,
        status=SampleStatus.COMPLETED,
        reward=1.0,
        **more,
    )


def section(*overrides):
    return load_recipe("", overrides).rollout


def test_age_is_counted_from_the_weights_that_a_step_trains_to_the_oldest_token():
    sample = spoken((4, 2), (6, 1))
    assert oldest_version(sample) == 4
    assert age(sample, 7) == 2 and age(sample, 5) == 0
    assert age(Sample(weight_versions=["default"]), 7) == 0 and oldest_version(Sample()) is None


def test_an_answer_whose_function_told_no_version_counts_as_old_as_it_can_be():
    told, silent, empty = spoken((6, 2)), spoken((6, 2)), Sample()
    silent.weight_versions, silent.version_spans = [], []
    stamp([told, silent, empty], 5)
    assert told.weight_versions == ["6"] and silent.weight_versions == ["5"] and empty.weight_versions == []


def test_only_tokens_of_older_weights_are_masked():
    sample = spoken((3, 2), (4, 3), (6, 1), loss_mask=[1, 1, 0, 1, 1, 1])
    mask_before(sample, 4)
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1]
    sample.check()


def test_without_spans_the_whole_answer_is_as_old_as_its_oldest_token():
    sample = spoken((3, 2), (4, 3))
    sample.version_spans = []
    mask_before(sample, 4)
    assert sample.loss_mask == [0] * 5


def test_an_answer_that_is_too_old_begins_anew_and_the_others_stay():
    group = [spoken((2, 2), index=6, metadata={"x": 1, "failure": "late"}), spoken((4, 2), index=7)]
    renewed, count = bounded(group, 6, section("rollout.max_staleness=2"))
    assert count == 1 and renewed[1] is group[1]
    first = renewed[0]
    assert (first.status, first.tokens, first.response_length, first.reward) == (SampleStatus.PENDING, [7, 8], 0, None)
    assert (first.index, first.group_index, first.metadata) == (6, 3, {"x": 1}) and not first.weight_versions
    assert bounded(group, 5, section("rollout.max_staleness=2")) == (group, 0), "exactly at the bound is allowed"


def test_or_its_old_tokens_are_not_trained_on():
    group = [spoken((2, 2), (3, 1))]
    kept, count = bounded(group, 6, section("rollout.max_staleness=2", "rollout.stale=mask"))
    assert kept is group and count == 1 and group[0].loss_mask == [0, 0, 1]


def test_partial_rollout_has_a_further_allowance():
    both = section("rollout.max_staleness=1", "rollout.partial=true", "rollout.partial_staleness=3")
    assert bounded([spoken((1, 2))], 6, both)[1] == 0 and bounded([spoken((1, 2))], 7, both)[1] == 1


def test_samples_of_one_execution_begin_anew_as_one():
    early, late = spoken((2, 2), index=6, rollout_id=6), spoken((5, 2), index=6, rollout_id=6)
    late.tokens = [7, 8, 9, 9, *late.tokens[-2:]]
    (prompt,) = as_prompts([late, early])
    assert prompt.tokens == [7, 8] and prompt.index == 6
    renewed, _ = bounded([early, late], 6, section("rollout.max_staleness=2"))
    assert [s.tokens for s in renewed] == [[7, 8]]


def test_metrics_leave_failed_answers_out():
    failed = Sample(status=SampleStatus.FAILED, weight_versions=["0"])
    found = age_metrics([[spoken((4, 1)), spoken((2, 1), (3, 1)), failed]], 5)
    assert found == {
        "rollout/staleness_mean": 1.0,
        "rollout/staleness_max": 2.0,
        "rollout/partial_fraction": 0.5,
    }
