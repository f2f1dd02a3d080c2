"""Off-policy corrections by hand: two answers of [2, 3] trained tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slimecli.algos import LossInputs, algorithm
from slimecli.algos.correction import LARGEST_LOG_RATIO, at_level, corrected, importance_weights, normalised
from slimecli.errors import DataError
from slimecli.recipe_algo import AlgoSection, CorrectionSection
from tests.algos import made

LN2 = math.log(2)
BOUNDS = torch.tensor([0, 3, 7])
MASK = torch.tensor([1.0, 1, 0, 1, 1, 1, 0])
LOG_RATIO = torch.tensor([LN2, LN2, 0, -LN2, 2 * LN2, -LN2, 0])
"""token ratios 2, 2 | 1/2, 4, 1/2; products 4 | 1; geometric means 2 | 1"""


def weights(**numbers):
    found, metrics = importance_weights(LOG_RATIO, MASK, BOUNDS, CorrectionSection(**numbers))
    return found[MASK > 0].tolist(), {k: v[MASK > 0].tolist() for k, v in metrics.items()}


def test_levels():
    for level, expected in (
        ("token", [2, 2, 0.5, 4, 0.5]),
        ("sequence", [4, 4, 1, 1, 1]),
        ("geometric", [2, 2, 1, 1, 1]),
    ):
        assert at_level(LOG_RATIO, MASK, BOUNDS, level)[MASK > 0].tolist() == pytest.approx(expected)


def test_untrained_positions_do_not_count_into_an_answer():
    noisy = torch.where(MASK > 0, LOG_RATIO, 5.0)
    for level in ("sequence", "geometric"):
        assert torch.equal(at_level(noisy, MASK, BOUNDS, level), at_level(LOG_RATIO, MASK, BOUNDS, level))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"level": "token", "high": 3.0}, [2, 2, 0.5, 3, 0.5]),  # TIS
        ({"level": "token", "low": 1.0, "high": 3.0}, [2, 2, 1, 3, 1]),  # TIS with a lower bound
        ({"level": "token", "high": 0.0}, [2, 2, 0.5, 4, 0.5]),  # decoupled: unbounded
        ({"level": "token", "mode": "mask", "low": 0.6, "high": 2.5}, [2, 2, 0, 0, 0]),  # IcePop
        ({"level": "sequence", "high": 3.0}, [3, 3, 1, 1, 1]),
        ({"level": "sequence", "mode": "mask", "high": 3.0}, [0, 0, 1, 1, 1]),  # MIS
        ({"level": "geometric", "mode": "mask", "low": 1.5, "high": 2.5}, [2, 2, 0, 0, 0]),
        ({"reject_level": "sequence", "reject_high": 3.0}, [0, 0, 1, 1, 1]),  # sequence masking, no weights
        ({"reject_level": "token", "reject_low": 0.6, "reject_high": 3.0}, [1, 1, 0, 0, 0]),
        ({"level": "token", "high": 2.0, "reject_level": "geometric", "reject_high": 1.5}, [0, 0, 0.5, 2, 0.5]),
        ({"veto": 0.6}, [1, 1, 0, 0, 0]),
        ({"level": "token", "high": 9.0, "veto": 0.4}, [2, 2, 0.5, 4, 0.5]),
    ],
)
def test_weights_by_hand(numbers, expected):
    assert weights(**numbers)[0] == pytest.approx(expected)


def test_metrics_tell_what_was_bounded_and_rejected():
    _, metrics = weights(level="token", low=1.0, high=3.0, reject_level="sequence", reject_high=3.0)
    assert metrics["correction_outside"] == [0, 0, 1, 1, 1]
    assert metrics["correction_rejected"] == [1, 1, 0, 0, 0]
    assert metrics["correction_weight"] == pytest.approx([0, 0, 1, 3, 1])


def test_bounds_belong_to_what_is_kept():
    ratio = torch.zeros(1)
    for mode in ("mask", "truncate"):
        section = CorrectionSection(level="token", mode=mode, low=1.0, high=1.0)
        assert importance_weights(ratio, torch.ones(1), torch.tensor([0, 1]), section)[0].item() == 1


def test_a_ratio_is_always_a_number():
    far = torch.tensor([500.0, -500.0])
    section = CorrectionSection(level="token", high=0.0)
    found, _ = importance_weights(far, torch.ones(2), torch.tensor([0, 1, 2]), section)
    assert found.tolist() == pytest.approx([math.exp(LARGEST_LOG_RATIO), math.exp(-LARGEST_LOG_RATIO)])


def loss_inputs(**changes):
    old = torch.full((7,), -2.0) * MASK
    fields = {
        "log_probs": old.clone().requires_grad_(),
        "entropy": torch.ones(7),
        "old_log_probs": None,
        "ref_log_probs": (old - 0.1) * MASK,
        "rollout_log_probs": old - LOG_RATIO,
        "advantages": torch.tensor([1.0, 1, 0, -1, -1, -1, 0]),
        "loss_mask": MASK,
        "cu_seqlens": BOUNDS,
    }
    return LossInputs(**{**fields, **changes})


TIS = AlgoSection(correction=CorrectionSection(level="token", high=3.0))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo"])
def test_the_correction_scales_the_policy_gradient_and_nothing_else(name):
    plain, corrected_ = loss_inputs(), loss_inputs()
    section = AlgoSection(name=name, kl_coef=0.1, kl_type="k2", entropy_coef=0.01)
    without, _ = algorithm(name).loss(plain, section)
    bare, _ = algorithm(name).loss(plain, AlgoSection(name=name))
    with_, _ = algorithm(name).loss(corrected_, section.model_copy(update={"correction": TIS.correction}))
    weight = torch.tensor([2.0, 2, 1, 0.5, 3, 0.5, 1])
    assert torch.allclose((with_ - without)[MASK > 0], (bare * (weight - 1))[MASK > 0], atol=1e-6)
    assert with_.requires_grad


def test_the_weight_has_no_gradient_and_speaks_of_the_old_policy_when_there_is_one():
    made = loss_inputs()
    algorithm("grpo").loss(made, TIS)[0].sum().backward()
    expected = -made.advantages * torch.tensor([2.0, 2, 1, 0.5, 3, 0.5, 1])
    assert made.log_probs.grad[MASK > 0].tolist() == pytest.approx(expected[MASK > 0].tolist())
    assert made.rollout_log_probs is not None
    same = loss_inputs(old_log_probs=made.rollout_log_probs.clone())
    _, metrics = algorithm("grpo").loss(same, TIS)
    assert metrics["correction_weight"].tolist() == [1] * 7


def test_the_decoupled_objective_is_importance_sampling_times_the_clipped_surrogate():
    """One token, mu = 0.1, proximal 0.2, policy 0.22, A = 1: w = 2, r = 1.1: loss -2.2; r = 1.5 is clipped: -2.4."""
    for pi, expected in ((0.22, -2.2), (0.30, -2.4)):
        made = LossInputs(
            log_probs=torch.tensor([math.log(pi)]),
            entropy=torch.zeros(1),
            old_log_probs=torch.tensor([math.log(0.2)]),
            ref_log_probs=None,
            rollout_log_probs=torch.tensor([math.log(0.1)]),
            advantages=torch.ones(1),
            loss_mask=torch.ones(1),
            cu_seqlens=torch.tensor([0, 1]),
        )
        section = AlgoSection(correction=CorrectionSection(level="token", high=0.0))
        assert algorithm("grpo").loss(made, section)[0].item() == pytest.approx(expected)


def test_opsm_leaves_out_bad_answers_that_the_policy_has_left():
    """mean log(mu / pi) is -ln 2 of the first answer, 0 of the second; shifted by 1 it is above 0.3 for both."""
    engine = loss_inputs().rollout_log_probs
    shifted = loss_inputs(rollout_log_probs=(engine + 1) * MASK)
    loss, metrics = corrected(torch.ones(7), shifted, AlgoSection(opsm_delta=0.3))
    assert loss.tolist() == [1, 1, 1, 0, 0, 0, 1], "good answers stay, and so does what is not trained"
    assert metrics["opsm_masked"].tolist() == [0, 0, 0, 1, 1, 1, 0]
    near, _ = corrected(torch.ones(7), loss_inputs(), AlgoSection(opsm_delta=0.3))
    assert near.tolist() == [1] * 7


def test_no_correction_changes_nothing_and_a_missing_engine_is_an_error():
    loss = torch.randn(7)
    assert corrected(loss, loss_inputs(rollout_log_probs=None), AlgoSection()) == (loss, {})
    for section in (TIS, AlgoSection(opsm_delta=1e-4), AlgoSection(correction=CorrectionSection(veto=0.1))):
        with pytest.raises(DataError, match="no rollout_log_probs"):
            corrected(loss, loss_inputs(rollout_log_probs=None), section)


def test_masking_keeps_the_estimate_unbiased_where_nothing_is_masked():
    """E_mu[w f] = E_pi[f] for every f, by summation over a vocabulary of three."""
    mu, pi = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    section = CorrectionSection(level="token", mode="mask", low=0.1, high=10.0)
    weight, _ = importance_weights((pi / mu).log(), torch.ones(3), torch.tensor([0, 1, 2, 3]), section)
    f = torch.tensor([3.0, -1.0, 7.0])
    assert float((mu * weight * f).sum()) == pytest.approx(float((pi * f).sum()), rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_normalised_weights_have_mean_one_and_scale_the_policy_gradient(name):
    batch = made.random_batch()
    correction = CorrectionSection(level="token", high=3.0, veto=0.4)
    plain, asked = (AlgoSection(correction=correction.model_copy(update={"normalize": n})) for n in (False, True))
    ready = made.ready(algorithm(name), plain, batch)
    log_ratio = (batch.old_log_probs - batch.rollout_log_probs) * batch.loss_mask
    weight, _ = importance_weights(log_ratio, batch.loss_mask, batch.cu_seqlens, correction)
    mean = float(weight[batch.loss_mask > 0].mean())
    assert mean != pytest.approx(1, abs=0.01)
    loss = made.step_loss(algorithm(name), plain, ready, made.policy(batch))
    found = made.step_loss(algorithm(name), asked, normalised(ready, asked), made.policy(batch))
    assert found.item() == pytest.approx(loss.item() / mean, rel=1e-5)
    assert normalised(ready, plain) is ready


def test_normalising_nothing_and_without_log_probs():
    batch = made.ready(algorithm("grpo"), AlgoSection(), made.random_batch())
    none_left = AlgoSection(correction=CorrectionSection(level="token", mode="mask", low=50, high=60, normalize=True))
    assert torch.equal(normalised(batch, none_left).advantages, batch.advantages)
    with pytest.raises(DataError, match="normalize"):
        normalised(batch.replace(rollout_log_probs=None), none_left)
