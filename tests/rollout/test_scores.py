import itertools
import random
import statistics

import pytest

from slimecli.rollout.scores import (
    interval,
    mean_with_error,
    paired_difference,
    pass_at_k,
    summarise_scores,
    unpaired_difference,
)


def test_pass_at_k_is_the_exact_chance_over_all_subsets():
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    found = pass_at_k([scores])
    assert list(found) == [1, 2, 4, 5]
    for k, value in found.items():
        subsets = list(itertools.combinations(scores, k))
        assert value == pytest.approx(sum(max(s) for s in subsets) / len(subsets))


def test_one_answer_a_prompt_gives_the_standard_error_of_a_mean():
    xs = [0.1, 0.9, 0.4, 0.4, 1.0]
    mean, error = mean_with_error([[x] for x in xs])
    assert mean == pytest.approx(statistics.mean(xs))
    assert error == pytest.approx(statistics.stdev(xs) / len(xs) ** 0.5)


def test_equal_answers_to_a_prompt_count_once():
    """Asking each prompt eight times for the same answer tells nothing new."""
    xs = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert mean_with_error([[x] * 8 for x in xs]) == pytest.approx(mean_with_error([[x] for x in xs]))


def test_the_error_is_that_of_the_mean_over_many_evaluations():
    """Prompts of different difficulty, four answers each: the stated error is the spread of the mean itself."""
    rng = random.Random(1)
    means, errors = [], []
    for _ in range(600):
        groups = [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(0.5, 0.5) for _ in range(60))]
        mean, error = mean_with_error(groups)
        means.append(mean)
        errors.append(error)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)
    naive = (0.25 / 240) ** 0.5  # as if all 240 answers were independent
    assert naive < 0.7 * statistics.mean(errors)


def test_intervals_cover_and_never_claim_certainty():
    rng = random.Random(2)
    hits = 0
    for _ in range(500):
        groups = [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(8, 2) for _ in range(40))]
        low, high = summarise_scores(groups)["interval"]
        hits += low <= 0.8 <= high
    assert 0.92 <= hits / 500 <= 0.98
    low, high = summarise_scores([[1.0]] * 20)["interval"]
    assert high == 1.0 and low == pytest.approx(0.839, abs=0.001), "Wilson's bound for 20 of 20"
    low, high = summarise_scores([[1.0, 0.0, 0.0]] * 20)["interval"]
    assert (low, high) == pytest.approx((0.169, 0.551), abs=0.001), "1/3 of every prompt is no certainty, but 20 draws"
    assert interval(0.5, 0.1, 9, is_share=False) == pytest.approx((0.304, 0.696), abs=1e-3)
    assert summarise_scores([[-1.0], [1.0]])["interval"][0] < -1.0, "no share, so not cut at 0"


def test_failed_answers_leave_smaller_groups():
    found = summarise_scores([[1.0, 0.0, 1.0], [1.0], []])
    assert found["n"] == 4 and found["prompts"] == 3 and found["mean"] == 0.75
    assert list(found["pass@k"]) == ["1"]


def test_what_is_hard_for_both_cancels_in_a_paired_difference():
    rng = random.Random(3)
    hard = [rng.random() for _ in range(200)]
    a = [[h] for h in hard]
    b = [[h + 0.1 + 0.01 * rng.random()] for h in hard]
    paired, unpaired = paired_difference(a, b), unpaired_difference(a, b)
    assert paired["difference"] == pytest.approx(unpaired["difference"])
    assert paired["stderr"] < 0.05 * unpaired["stderr"]
    assert paired["interval"][0] > 0 > unpaired["interval"][0] - 0.1
    assert paired_difference([[1.0], []], [[0.0], [1.0]])["prompts"] == 1, "only prompts that both answered"
