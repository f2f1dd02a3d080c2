"""Advantages of every estimator by hand, and what all of them must hold to."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from slimecli.algos import ALGORITHMS, algorithm
from slimecli.errors import SlimeError
from slimecli.recipe_algo import AlgoSection
from tests.algos import made

ESTIMATORS = [name for name in ALGORITHMS if name != "sft"]
WITHOUT_CRITIC = [name for name in ESTIMATORS if name != "ppo"]
COMPARING = [name for name in WITHOUT_CRITIC if name != "reinforce_plus_plus"]
KL = {"kl_coef": 0.1, "kl_place": "reward", "kl_type": "k1"}
GROUPS = [[(1.0, [1, 1]), (0.0, [1]), (0.0, [1, 0, 1])], [(5.0, [1]), (7.0, [1])]]
"""two groups of sizes 3 and 2"""


def per_answer(name, groups=GROUPS, **numbers):
    """The advantage at the first trained position of each answer, after checking that the others have the same."""
    batch = made.batch(groups)
    found = algorithm(name).advantages(batch, AlgoSection(name=name, **numbers))
    assert found.shape == batch.tokens.shape and found[batch.loss_mask == 0].abs().max() == 0
    bounds = batch.cu_seqlens.tolist()
    rows = [found[a:b][batch.loss_mask[a:b] > 0].tolist() for a, b in itertools.pairwise(bounds)]
    assert all(len(set(row)) == 1 for row in rows)
    return [row[0] for row in rows]


def test_group_relative_estimators_by_hand():
    """rewards 1, 0, 0: mean 1/3, unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3; rewards 5, 7: mean 6, variance 2."""
    s, t = math.sqrt(1 / 3), math.sqrt(2)
    by_std = [2 / 3 / s, -1 / 3 / s, -1 / 3 / s, -1 / t, 1 / t]
    centred = [2 / 3, -1 / 3, -1 / 3, -1, 1]
    for name in ("grpo", "gspo", "cispo"):
        assert per_answer(name) == pytest.approx(by_std, abs=1e-5)
        assert per_answer(name, std_normalization=False) == pytest.approx(centred)
    assert per_answer("dr_grpo") == pytest.approx(centred)


def test_rloo_by_hand():
    """Each against the mean of the others: 1 - 0, 0 - 1/2, 0 - 1/2; 5 - 7, 7 - 5. It is k / (k - 1) of Dr. GRPO's."""
    assert per_answer("rloo") == pytest.approx([1, -0.5, -0.5, -2, 2])
    scale = [3 / 2, 3 / 2, 3 / 2, 2, 2]
    expected = [k * a for k, a in zip(scale, per_answer("dr_grpo"), strict=True)]
    assert per_answer("rloo") == pytest.approx(expected)


def test_reinforce_plus_plus_by_hand():
    """Trained tokens 2, 1 with rewards 3, 0: returns 3, 3, 0; mean 2, unbiased variance (1 + 1 + 4) / 2 = 3."""
    found = per_answer("reinforce_plus_plus", [[(3.0, [1, 1])], [(0.0, [1])]])
    assert found == pytest.approx([1 / math.sqrt(3), -2 / math.sqrt(3)])


def test_reinforce_plus_plus_discounts_towards_the_end():
    """gamma 0.5: returns 1, 2 | 0, the hole takes no time; mean 1, unbiased variance 1."""
    batch = made.batch([[(2.0, [1, 0, 1])], [(0.0, [1])]])
    found = algorithm("reinforce_plus_plus").advantages(batch, AlgoSection(gamma=0.5))
    assert found.tolist() == pytest.approx([0, 0, 1, 0, -1, 0], abs=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
    """Centred 1, 1 (two tokens) and -1: mean 1/3, unbiased variance (4/9 + 4/9 + 16/9) / 2 = 4/3."""
    found = per_answer("reinforce_plus_plus_baseline", [[(3.0, [1, 1]), (1.0, [1])]])
    scale = math.sqrt(4 / 3)
    assert found == pytest.approx([2 / 3 / scale, -4 / 3 / scale])


def with_kl(groups, kl):
    """A batch whose old policy is `kl` (k1) off the reference at each trained token."""
    batch = made.batch(groups)
    old = torch.full_like(batch.loss_mask, -1.0) * batch.loss_mask
    ref = old.clone()
    ref[batch.loss_mask > 0] -= torch.tensor(kl)
    return batch.replace(old_log_probs=old, ref_log_probs=ref)


def test_kl_in_the_reward_of_whole_answers():
    """coef 0.1: rewards 1 - 0.1 (1 + 2) = 0.7 and 0 - 0.1 (3) = -0.3: centred 0.5, -0.5; left out: 1, -1."""
    batch = with_kl([[(1.0, [1, 1]), (0.0, [1])]], [1.0, 2.0, 3.0])
    for name, expected in (("dr_grpo", 0.5), ("rloo", 1.0), ("grpo", 0.5 / math.sqrt(0.5))):
        found = algorithm(name).advantages(batch, AlgoSection(**KL))
        assert found.tolist() == pytest.approx([expected, expected, 0, -expected, 0], abs=1e-5)
    raw = algorithm("grpo").advantages(batch, AlgoSection(**KL, rewards_normalization=False))
    assert raw.tolist() == pytest.approx([0.7, 0.7, 0, -0.3, 0])


def test_kl_in_the_reward_of_tokens():
    """reinforce_plus_plus: token rewards -0.1, 1 - 0.2 | -0.3: returns 0.7, 0.8 | -0.3.
    The baseline variant: centred 0.5 | -0.5, each minus its own token's KL: 0.4, 0.3 | -0.8."""
    batch = with_kl([[(1.0, [1, 1]), (0.0, [1])]], [1.0, 2.0, 3.0])
    for name, plain in (
        ("reinforce_plus_plus", [0.7, 0.8, -0.3]),
        ("reinforce_plus_plus_baseline", [0.4, 0.3, -0.8]),
    ):
        found = algorithm(name).advantages(batch, AlgoSection(**KL))[batch.loss_mask > 0]
        values = torch.tensor(plain)
        assert torch.allclose(found, (values - values.mean()) / values.std(), atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_in_the_reward_needs_log_probs(name):
    with pytest.raises(SlimeError, match="old_log_probs"):
        algorithm(name).advantages(made.batch(GROUPS), AlgoSection(**KL))


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_equal_rewards_give_exactly_no_advantage(name):
    groups = [[(0.1, [1, 1]), (0.1, [1, 0, 1]), (0.1, [1])], [(0.1, [1, 1, 1])]]
    batch = made.batch(groups)
    for whiten in (False, True):
        found = algorithm(name).advantages(batch, AlgoSection(whiten_advantages=whiten))
        assert found.abs().max() == 0


@pytest.mark.parametrize("name", COMPARING)
def test_what_a_question_is_worth_does_not_matter(name):
    """A constant added to all rewards of one group changes nothing; groups may differ in size, and one may be alone."""
    groups = [[(1.0, [1, 1]), (0.0, [1]), (0.5, [1, 1])], [(5.0, [1]), (7.0, [1])], [(3.0, [1])]]
    raised = [[(r + 4.0 * g, mask) for r, mask in group] for g, group in enumerate(groups)]
    assert per_answer(name, raised) == pytest.approx(per_answer(name, groups), abs=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "grpo"])
def test_advantages_of_a_group_sum_to_zero(name):
    found = per_answer(name)
    assert sum(found[:3]) == pytest.approx(0, abs=1e-6) and sum(found[3:]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_samples_does_not_matter(name):
    batch = made.random_batch()
    order = torch.randperm(batch.num_samples, generator=torch.Generator().manual_seed(3)).tolist()
    section = AlgoSection(**KL, gamma=0.9)
    straight = batch.replace(advantages=algorithm(name).advantages(batch, section)).select(order)
    turned = batch.select(order)
    assert torch.allclose(algorithm(name).advantages(turned, section), straight.advantages, atol=1e-6)


def test_normalisation_can_be_left_out():
    assert per_answer("grpo", rewards_normalization=False) == [1, 0, 0, 5, 7]
    batch = made.batch(GROUPS)
    found = algorithm("grpo").advantages(batch, AlgoSection(whiten_advantages=True))[batch.loss_mask > 0]
    assert float(found.mean()) == pytest.approx(0, abs=1e-6) and float(found.var()) == pytest.approx(1, rel=1e-5)


def test_ppo_by_hand():
    """Answer of two trained tokens and a hole, reward 1, values 0.5 and 0.25, gamma 0.5, lambda 0.5:
    delta_1 = 1 - 0.25 = 0.75, delta_0 = 0.5 x 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 x 0.75 = -0.1875."""
    batch = made.batch([[(1.0, [1, 0, 1])]]).replace(values=torch.tensor([0.5, 0.0, 0.25, 0.0]))
    section = AlgoSection(name="ppo", gamma=0.5, gae_lambda=0.5)
    assert algorithm("ppo").advantages(batch, section).tolist() == [-0.1875, 0, 0.75, 0]
    assert algorithm("ppo").returns(batch, section).tolist() == [0.3125, 0, 1, 0]


def test_ppo_with_a_perfect_critic_has_no_advantage():
    batch = made.batch([[(1.0, [1, 1]), (0.0, [1])]])
    perfect = batch.replace(values=torch.tensor([1.0, 1, 0, 0, 0]))
    assert algorithm("ppo").advantages(perfect, AlgoSection(gae_lambda=0.7)).abs().max() == 0


def test_ppo_subtracts_the_kl_token_by_token_and_the_critic_learns_unwhitened_returns():
    """Values 0, lambda 1: returns are those of reinforce_plus_plus: 0.7, 0.8 | -0.3; whitened, its advantages."""
    batch = with_kl([[(1.0, [1, 1]), (0.0, [1])]], [1.0, 2.0, 3.0])
    section = AlgoSection(**KL, whiten_advantages=True)
    assert algorithm("ppo").returns(batch, section).tolist() == pytest.approx([0.7, 0.8, 0, -0.3, 0])
    expected = algorithm("reinforce_plus_plus").advantages(batch, section)
    assert torch.allclose(algorithm("ppo").advantages(batch, section), expected, atol=1e-6)
    with pytest.raises(SlimeError, match="no values"):
        algorithm("ppo").advantages(batch.replace(values=None), AlgoSection())
