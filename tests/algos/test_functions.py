"""The tensor functions, against numbers worked out by hand and closed forms."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from slimecli.algos import ALGORITHMS, algorithm
from slimecli.algos.functions import (
    clipped_surrogate,
    group_centred,
    kl_estimate,
    leave_one_out,
    per_sample_mean,
    per_sample_sum,
    per_token,
    whiten,
)
from slimecli.errors import UsageError
from slimecli.recipe_algo import AlgoSection
from tests.algos import made


def test_group_centred_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 7.0])
    ids = torch.tensor([5, 5, 5, 5, 2, 2])
    assert group_centred(rewards, ids, by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5, -2, 2]
    std_5, std_2 = math.sqrt(1 / 3), math.sqrt(8)
    expected = torch.tensor([0.5 / std_5, -0.5 / std_5, -0.5 / std_5, 0.5 / std_5, -2 / std_2, 2 / std_2])
    assert torch.allclose(group_centred(rewards, ids, by_std=True), expected, atol=1e-5)


def test_group_centred_goes_by_id_not_by_position():
    rewards, ids = torch.tensor([1.0, 3.0, 0.0, 7.0]), torch.tensor([0, 1, 0, 1])
    assert group_centred(rewards, ids, by_std=False).tolist() == [0.5, -2, -0.5, 2]
    order = torch.tensor([3, 1, 0, 2])
    shuffled = group_centred(rewards[order], ids[order], by_std=True)
    assert torch.equal(shuffled, group_centred(rewards, ids, by_std=True)[order])


def test_groups_without_difference_or_of_one_are_exactly_zero():
    rewards, ids = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([0, 0, 0, 1])
    for by_std in (True, False):
        assert group_centred(rewards, ids, by_std=by_std).tolist() == [0, 0, 0, 0]


def test_kl_estimators_by_hand():
    lp, base = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate(lp, base, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(lp, base, "k2").tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    assert kl_estimate(lp, base, "k3").tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_kl_as_mean(kind):
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "slope"), [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))]
)
def test_kl_gradients(kind, slope):
    for d in (-2.0, -0.1, 0.0, 0.3, 1.5):
        lp = torch.tensor(d - 3.0, dtype=torch.float64, requires_grad=True)
        kl_estimate(lp, torch.tensor(-3.0, dtype=torch.float64), kind).backward()
        assert float(lp.grad) == pytest.approx(slope(d), abs=1e-12)


def test_kl_of_equal_models_is_exactly_zero():
    lp = torch.randn(100) - 3
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(lp, lp.clone(), kind).abs().max() == 0


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = clipped_surrogate(ratio, advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2])
    assert clipped.tolist() == [1, 0, 0, 1, 0]


def test_per_token():
    assert per_token(torch.tensor([3.0, 4.0]), torch.tensor([0, 2, 3])).tolist() == [3, 3, 4]


def test_registry():
    for name in ALGORITHMS:
        assert algorithm(name).name == name
    with pytest.raises(UsageError, match="did you mean 'rloo'"):
        algorithm("rlo")


def test_low_var_kl_is_bounded_after_weighting():
    lp, base = torch.tensor([-20.0, -1.0]), torch.tensor([-1.0, -1.5])
    k3 = math.exp(-0.5) - 0.5
    assert kl_estimate(lp, base, "low_var_kl").tolist() == pytest.approx([10, k3])
    assert kl_estimate(lp, base, "low_var_kl", torch.tensor([1.0, 200.0])).tolist() == [10, 10]
    assert kl_estimate(lp, base, "k3")[0] > 1e8


def test_kl_estimators_on_samples():
    """40 000 samples of a policy over six tokens: k1 and k3 come within their own error of the exact KL, k3 with less
    variance than k1; k2 is biased but near for near policies."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    q = torch.softmax(p.log() + 0.3 * torch.randn(6, generator=generator, dtype=torch.float64), 0)
    exact = float((p * (p / q).log()).sum())
    drawn = torch.multinomial(p, 40_000, replacement=True, generator=generator)
    found = {kind: kl_estimate(p.log()[drawn], q.log()[drawn], kind) for kind in ("k1", "k2", "k3")}
    for kind in ("k1", "k3"):
        error = float(found[kind].std()) / math.sqrt(len(drawn))
        assert abs(float(found[kind].mean()) - exact) < 3 * error
    assert float(found["k3"].std()) < float(found["k1"].std()) / 3
    assert float(found["k2"].mean()) == pytest.approx(exact, rel=0.2)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighted_kl_has_value_and_gradient_of_the_kl_though_samples_are_old(kind):
    """By summation over a vocabulary: E_old[ratio x estimate] = KL(policy || base), and so are the gradients."""
    old, base = (torch.tensor(x, dtype=torch.float64) for x in ([0.4, 0.3, 0.3], [0.2, 0.2, 0.6]))
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, 0)
    exact = (log_p.exp() * (log_p - base.log())).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (old * kl_estimate(log_p, base.log(), kind, (log_p - old.log()).exp())).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-9)
    assert torch.allclose(gradient, expected, atol=1e-9)


def test_whiten_by_hand():
    """1, 3, 5 among what is masked: mean 3, unbiased variance 4."""
    values, mask = torch.tensor([1.0, 9.0, 3.0, 5.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert whiten(values, mask).tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)
    assert whiten(values, torch.tensor([0.0, 1, 0, 0])).tolist() == [0, 0, 0, 0]
    assert whiten(torch.full((4,), 0.1), mask).tolist() == [0, 0, 0, 0]
    assert whiten(values, torch.zeros(4)).tolist() == [0, 0, 0, 0]


def test_leave_one_out_by_hand():
    rewards, ids = torch.tensor([1.0, 5.0, 3.0, 2.0, 0.1, 0.1]), torch.tensor([4, 1, 4, 4, 7, 7])
    assert leave_one_out(rewards, ids).tolist() == [1 - 2.5, 0, 3 - 1.5, 2 - 2, 0, 0]


def test_sums_and_means_of_samples():
    bounds, mask = torch.tensor([0, 2, 2, 5]), torch.tensor([1.0, 0, 0, 1, 1])
    values = torch.tensor([1.0, 2, 3, 4, 6])
    assert per_sample_sum(values, bounds).tolist() == [3, 0, 13]
    assert per_sample_mean(values, mask, bounds).tolist() == [1, 0, 5]


@pytest.mark.parametrize("form", ["OWN", "make"])
def test_an_own_algorithm_by_path(tmp_path, form):
    path = tmp_path / f"own_{form}.py"
    path.write_text(
        "from slimecli.algos import Algorithm\n"
        "def advantages(batch, section):\n    return batch.loss_mask * 7\n"
        "def loss(inputs, section):\n    return -inputs.advantages * inputs.log_probs, {}\n"
        "OWN = Algorithm(name='own', advantages=advantages, loss=loss)\n"
        "def make():\n    return OWN\n"
        "WRONG = 3\n"
    )
    assert algorithm(f"{path}:{form}").name == "own"
    with pytest.raises(UsageError, match="is a int"):
        algorithm(f"{path}:WRONG")
    with pytest.raises(UsageError, match=f"has no '{form}x'"):
        algorithm(f"{path}:{form}x")


def test_the_example_of_the_docs_is_an_algorithm(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(source)
    mine, section = algorithm(f"{path}:MINE"), AlgoSection()
    batch = made.batch([[(1.0, [1, 1]), (0.0, [0, 1])]])
    assert mine.advantages(batch, section).tolist() == [0.5, 0.5, 0, 0, -0.5, 0]
    ready = made.ready(mine, section, batch)
    log_probs = torch.zeros(batch.num_tokens, requires_grad=True)
    made.step_loss(mine, section, ready, log_probs).backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.125, -0.125, 0, 0, 0.25, 0])


def test_cutting_an_execution_in_parts_changes_nobody_elses_advantage():
    """Rewards 3, 1, 2 of a group; the first execution is cut into three samples, the last into two."""
    rewards, ids = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.5]), torch.tensor([4, 4, 4, 7, 7])
    cut = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4])
    for function in (
        lambda r, g, e: group_centred(r, g, e, by_std=True),
        lambda r, g, e: group_centred(r, g, e, by_std=False),
        leave_one_out,
    ):
        whole = function(rewards, ids, torch.arange(5))
        assert torch.equal(whole, function(rewards, ids, None))
        parts = function(rewards[cut], ids[cut], cut + 10)
        assert torch.allclose(parts, whole[cut], atol=1e-6)


def test_agents_of_one_execution_may_differ_in_reward():
    rewards = torch.tensor([1.0, 0.0, 0.0])  # two agents of the first execution, and another execution
    ids, executions = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    assert group_centred(rewards, ids, executions, by_std=False).tolist() == [0.75, -0.25, -0.25]
    assert leave_one_out(rewards, ids, executions).tolist() == [1.0, 0.0, -0.5]
    alone = torch.zeros(3, dtype=torch.int64)
    assert group_centred(rewards, ids, alone, by_std=False).tolist() == [0, 0, 0]
