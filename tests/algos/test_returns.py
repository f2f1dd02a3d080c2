"""GAE, discounted returns and the value loss, by hand and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from slimecli.algos.returns import at_last_step, clipped_value_loss, discounted_returns, gae

ONES = torch.ones(3)
ONE_SAMPLE = torch.tensor([0, 3])


def test_gae_by_hand():
    """gamma 0.5, lam 0.5, rewards [0, 0, 4], values [1, 2, 3]:
    delta_2 = 4 - 3 = 1, delta_1 = 0.5*3 - 2 = -0.5, delta_0 = 0.5*2 - 1 = 0
    A_2 = 1, A_1 = -0.5 + 0.25*1 = -0.25, A_0 = 0 + 0.25*(-0.25) = -0.0625
    """
    advantages, returns = gae(torch.tensor([0.0, 0, 4]), torch.tensor([1.0, 2, 3]), ONES, ONE_SAMPLE, 0.5, 0.5)
    assert advantages.tolist() == [-0.0625, -0.25, 1.0]
    assert returns.tolist() == [0.9375, 1.75, 4.0]


def test_lambda_one_is_return_minus_value_and_lambda_zero_is_the_td_error():
    rewards, values = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.25, -1.0])
    advantages, returns = gae(rewards, values, ONES, ONE_SAMPLE, 0.9, 1.0)
    g2, g1 = 3.0, -2.0 + 0.9 * 3.0
    g0 = 1.0 + 0.9 * g1
    assert returns.tolist() == pytest.approx([g0, g1, g2], rel=1e-6)
    assert (advantages + values).tolist() == pytest.approx([g0, g1, g2], rel=1e-6)
    td, _ = gae(rewards, values, ONES, ONE_SAMPLE, 0.9, 0.0)
    assert td.tolist() == pytest.approx([1 + 0.9 * 0.25 - 0.5, -2 + 0.9 * -1 - 0.25, 3 + 1.0], rel=1e-6)


def test_a_perfect_value_function_leaves_no_advantage():
    values = torch.tensor([0.25, 0.5, 1.0])
    advantages, returns = gae(torch.tensor([0.0, 0, 1]), values, ONES, ONE_SAMPLE, 0.5, 0.7)
    assert advantages.tolist() == [0, 0, 0] and torch.equal(returns, values)


def test_samples_do_not_touch_and_untrained_positions_take_no_time():
    """The same steps with a hole in the middle, behind another sample, and before an empty one."""
    rewards, values = torch.tensor([0.0, 0, 4]), torch.tensor([1.0, 2, 3])
    alone, _ = gae(rewards, values, ONES, ONE_SAMPLE, 0.5, 0.5)
    packed_rewards = torch.tensor([9.0, 0, 0, 7, 4, 5, 5])
    packed_values = torch.tensor([8.0, 1, 2, 7, 3, 5, 5])
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 0])
    found, returns = gae(packed_rewards, packed_values, mask, torch.tensor([0, 1, 5, 7]), 0.5, 0.5)
    assert found.tolist() == [1, *alone[:2].tolist(), 0, alone[2], 0, 0]
    assert returns[mask == 0].abs().max() == 0


def test_gae_is_the_plain_recursion():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 30, 4]
    bounds = torch.tensor([0, 1, 8, 38, 42])
    rewards, values = torch.randn(42, generator=generator), torch.randn(42, generator=generator)
    found, _ = gae(rewards, values, torch.ones(42), bounds, 0.97, 0.9)
    for start, length in zip(bounds.tolist(), lengths, strict=False):
        carry, following = 0.0, 0.0
        for t in reversed(range(start, start + length)):
            carry = float(rewards[t]) + 0.97 * following - float(values[t]) + 0.97 * 0.9 * carry
            following = float(values[t])
            assert float(found[t]) == pytest.approx(carry, rel=1e-5, abs=1e-6)


def test_discounted_returns():
    """[1, 2, 4] at gamma 0.5: 4, 2 + 2, 1 + 2."""
    assert discounted_returns(torch.tensor([1.0, 2, 4]), ONES, ONE_SAMPLE, 0.5).tolist() == [3, 4, 4]
    assert discounted_returns(torch.tensor([1.0, 2, 4]), ONES, ONE_SAMPLE, 1.0).tolist() == [7, 6, 4]


def test_an_outcome_reward_is_discounted_by_its_distance():
    mask = torch.ones(50)
    rewards = at_last_step(torch.tensor([2.0]), mask, torch.tensor([0, 50]))
    returns = discounted_returns(rewards, mask, torch.tensor([0, 50]), 0.9)
    assert returns.tolist() == pytest.approx([2 * 0.9 ** (49 - t) for t in range(50)], rel=1e-5)


def test_the_reward_stands_at_the_last_trained_position():
    mask = torch.tensor([0.0, 1, 1, 0, 0, 0, 1, 0])
    found = at_last_step(torch.tensor([5.0, 6.0, 7.0]), mask, torch.tensor([0, 4, 5, 8]))
    assert found.tolist() == [0, 0, 5, 0, 0, 0, 7, 0]


def test_value_loss_by_hand():
    """clip 0.5, old 1, return 3: V = 2 moves by 1, V' = 1.5: max(1, 2.25). V = 0.8: unclipped, 2.2^2. V = 4, return 1:
    V' = 1.5, max(9, 0.25): the larger is the unclipped one."""
    values, returns = torch.tensor([2.0, 0.8, 4.0]), torch.tensor([3.0, 3.0, 1.0])
    loss, clipped = clipped_value_loss(values, torch.ones(3), returns, 0.5)
    assert loss.tolist() == pytest.approx([2.25, 2.2**2, 9.0])
    assert clipped.tolist() == [1, 0, 0]


def test_a_clipped_value_has_no_gradient():
    values = torch.tensor([2.0, 1.2], requires_grad=True)
    clipped_value_loss(values, torch.ones(2), torch.full((2,), 3.0), 0.5)[0].sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 2 * (1.2 - 3.0)])


def test_half_a_life():
    """gamma^k with k from the distance alone: gamma = 0.5 ** (1 / 10) halves after ten steps."""
    mask, bounds = torch.ones(11), torch.tensor([0, 11])
    returns = discounted_returns(at_last_step(ONES[:1], mask, bounds), mask, bounds, math.pow(0.5, 0.1))
    assert float(returns[0]) == pytest.approx(0.5, rel=1e-6)
