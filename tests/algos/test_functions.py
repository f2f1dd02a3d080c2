"""The tensor functions, against numbers worked out by hand and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from slimecli.algos import ALGORITHMS, algorithm
from slimecli.algos._functions import clipped_surrogate, group_centred, kl_estimate, per_token
from slimecli.errors import UsageError


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
