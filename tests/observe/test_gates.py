import math

import pytest

from slimecli.observe.gates import check_gates
from slimecli.recipe_sections import GatesSection

HEALTHY = {
    "rollout/reward": 0.5,
    "rollout/zero_variance_fraction": 0.2,
    "train/logprob_gap": 1e-6,
    "train/first_step_kl": 0.0,
}
GATES = GatesSection(max_logprob_gap=0.01, first_step_kl=1e-6, max_zero_variance=0.5)


def test_a_healthy_step_breaks_nothing():
    assert check_gates(GATES, 1, HEALTHY) == []


@pytest.mark.parametrize(
    ("metric", "value", "gate"),
    [
        ("train/logprob_gap", 0.02, "gates.max_logprob_gap"),
        ("train/logprob_gap", math.nan, "gates.max_logprob_gap"),
        ("train/first_step_kl", -1e-3, "gates.first_step_kl"),
        ("rollout/zero_variance_fraction", 0.51, "gates.max_zero_variance"),
    ],
)
def test_each_gate_breaks_on_its_own_metric(metric, value, gate):
    (verdict,) = check_gates(GATES, 7, HEALTHY | {metric: value})
    assert (verdict.gate, verdict.metric, verdict.step, verdict.action) == (gate, metric, 7, "stop")
    assert verdict.gate in verdict.fix
    assert verdict.to_dict()["limit"] == verdict.limit


def test_older_weights_alone_make_a_gap():
    stale = HEALTHY | {"rollout/staleness_max": 1.0, "train/logprob_gap": 0.02}
    assert check_gates(GATES, 5, stale) == []
    assert check_gates(GATES, 5, stale | {"rollout/staleness_max": 0.0})
    assert check_gates(GATES, 5, stale | {"train/logprob_gap": math.nan}), "but never one that is no number"


def test_a_metric_that_an_rl_step_does_not_report_breaks_its_gate():
    without = {k: v for k, v in HEALTHY.items() if k != "train/logprob_gap"}
    (verdict,) = check_gates(GATES, 2, without)
    assert verdict.value is None
    assert "was not measured" in verdict.what


def test_sft_steps_are_judged_by_what_they_report():
    assert check_gates(GATES, 2, {"train/loss": 1.0}) == []


def test_the_recipe_decides_the_action():
    warn = GatesSection(action="warn", max_logprob_gap=1e-9)
    assert [v.action for v in check_gates(warn, 1, HEALTHY)] == ["warn"]
