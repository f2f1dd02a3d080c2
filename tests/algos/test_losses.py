"""Policy losses by hand, their gradients, and what they have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slimecli.algos import ALGORITHMS, LossInputs, algorithm
from slimecli.algos.functions import per_sample_mean
from slimecli.recipe_algo import AlgoSection
from tests.algos import made

ESTIMATORS = [name for name in ALGORITHMS if name != "sft"]


def one_answer(ratios, advantage, **changes):
    """An answer of two trained tokens with these policy ratios, behind one that is not trained."""
    old = torch.tensor([-1.0, -2.0, 0.0])
    log_probs = old + torch.tensor([math.log(r) for r in ratios] + [0.0])
    fields = {
        "log_probs": log_probs.requires_grad_(),
        "entropy": torch.zeros(3),
        "old_log_probs": old,
        "ref_log_probs": None,
        "rollout_log_probs": None,
        "advantages": torch.tensor([advantage, advantage, 0.0]),
        "loss_mask": torch.tensor([1.0, 1.0, 0.0]),
        "cu_seqlens": torch.tensor([0, 3]),
    }
    return LossInputs(**{**fields, **changes})


def evaluate(name, ratios, advantage, **numbers):
    inputs = one_answer(ratios, advantage)
    loss, metrics = algorithm(name).loss(inputs, AlgoSection(name=name, **numbers))
    loss.sum().backward()
    return loss[:2].tolist(), inputs.log_probs.grad[:2].tolist(), {k: v[:2].tolist() for k, v in metrics.items()}


def test_gspo_has_one_ratio_per_answer():
    """Ratios 1.21 and 1: s = sqrt(1.21) = 1.1, at both tokens; the gradient of the sum is -s A x 2 tokens / 2 each."""
    loss, gradient, metrics = evaluate("gspo", (1.21, 1.0), 2.0)
    assert loss == pytest.approx([-2.2, -2.2])
    assert gradient == pytest.approx([-2.2, -2.2])
    assert metrics["ppo_kl"] == pytest.approx([-math.log(1.1)] * 2)
    assert metrics["clip_fraction"] == [0, 0]


def test_gspo_clips_whole_answers():
    """s = sqrt(1.69) = 1.3 is above 1.2: both tokens lose their gradient, also the one whose own ratio is 1."""
    loss, gradient, metrics = evaluate("gspo", (1.69, 1.0), 2.0)
    assert loss == pytest.approx([-2.4, -2.4])
    assert gradient == [0, 0]
    assert metrics["clip_fraction"] == [1, 1]


def test_gspo_with_equal_ratios_is_grpo():
    for ratio in (0.7, 1.0, 1.1, 1.3):
        for advantage in (1.5, -1.5):
            left, right = (evaluate(name, (ratio, ratio), advantage) for name in ("gspo", "grpo"))
            assert left[0] == pytest.approx(right[0], rel=1e-5) and left[1] == pytest.approx(right[1], rel=1e-5)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """eps_clip 1, eps_clip_high 4: ratios 8 and 0.5 weigh 5 and 0.5; loss -w A log pi, gradient -w A."""
    loss, gradient, metrics = evaluate("cispo", (8.0, 0.5), 2.0, eps_clip=1.0, eps_clip_high=4.0)
    assert loss == pytest.approx([-10 * (-1 + math.log(8)), -1 * (-2 + math.log(0.5))], rel=1e-5)
    assert gradient == pytest.approx([-10, -1], rel=1e-5)
    assert metrics["clip_fraction"] == [1, 0]


def test_dual_clip_bounds_the_loss_of_bad_answers():
    """A = -1, c = 3: ratio 5 costs 5, bounded to 3 and without gradient; ratio 2 stays. Good answers are untouched."""
    loss, gradient, metrics = evaluate("grpo", (5.0, 2.0), -1.0, dual_clip=3.0)
    assert loss == pytest.approx([3, 2]) and gradient == pytest.approx([0, 2])
    assert metrics["dual_clip_fraction"] == [1, 0]
    assert evaluate("grpo", (5.0, 0.1), 1.0, dual_clip=3.0)[:2] == evaluate("grpo", (5.0, 0.1), 1.0)[:2]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_on_policy_every_estimator_has_the_policy_gradient(name, advantage):
    """Ratio 1: the gradient of sum_t l_t is -A at every trained token, whatever is clipped and however."""
    for old in (None, torch.tensor([-1.0, -2.0, 0.0])):
        inputs = one_answer((1.0, 1.0), advantage, old_log_probs=old)
        section = AlgoSection(name=name, dual_clip=2.0)
        loss, metrics = algorithm(name).loss(inputs, section)
        loss.sum().backward()
        assert inputs.log_probs.grad.tolist() == [-advantage, -advantage, 0]
        assert metrics["ppo_kl"].abs().max() == 0 and metrics["clip_fraction"].max() == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_are_those_of_the_loss(name):
    """Finite differences in float64, away from the kinks of the clipping; CISPO's weight is held, as it says."""
    batch = made.ready(algorithm(name), section := AlgoSection(name=name, kl_coef=0.1, entropy_coef=0.01), doubled())
    start = made.policy(made.random_batch()).detach().double()

    def total(log_probs):
        inputs = made.inputs(batch, log_probs)
        if name == "cispo":
            inputs = replace(inputs, old_log_probs=inputs.old_log_probs + (log_probs - start).detach())
        return (algorithm(name).loss(inputs, section)[0] * batch.loss_weight.double()).sum()

    assert torch.autograd.gradcheck(total, start.clone().requires_grad_(), eps=1e-7, atol=1e-5)


def doubled():
    batch = made.random_batch()
    names = ("loss_mask", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    return batch.replace(**{n: getattr(batch, n).double() for n in names})


def test_kl_is_in_the_loss_or_only_reported():
    ref = torch.tensor([-1.5, -2.0, 0.0])
    for place, expected in (("loss", -1 + 0.1 * 0.5), ("reward", -1.0)):
        inputs = one_answer((1.0, 1.0), 1.0, ref_log_probs=ref)
        section = AlgoSection(kl_coef=0.1, kl_type="k1", kl_place=place)
        loss, metrics = algorithm("grpo").loss(inputs, section)
        assert loss[0].item() == pytest.approx(expected) and metrics["kl"][0].item() == pytest.approx(0.5)


def test_unbiased_kl_is_weighted_by_the_ratio_with_gradient():
    """d = 0.5 at ratio 2: value 2 k3, gradient 2 (k3 + 1 - exp(-d)) = 2 d, as d/dx [e^x k3(x)] says."""
    inputs = one_answer((2.0, 1.0), 0.0)
    inputs = replace(inputs, ref_log_probs=inputs.log_probs.detach() - torch.tensor([0.5, 0.0, 0.0]))
    loss, metrics = algorithm("grpo").loss(inputs, AlgoSection(kl_coef=1.0, kl_unbiased=True))
    loss.sum().backward()
    assert metrics["kl"][0].item() == pytest.approx(2 * (math.exp(-0.5) - 0.5), rel=1e-5)
    assert inputs.log_probs.grad[0].item() == pytest.approx(2 * 0.5, rel=1e-5)


def test_an_answer_without_trained_tokens_takes_no_part():
    batch = made.batch([[(1.0, [0, 0]), (0.0, [1, 1])]])
    values = torch.arange(float(batch.num_tokens))
    assert per_sample_mean(values, batch.loss_mask, batch.cu_seqlens).tolist() == [0, 3.5]
    for name in ESTIMATORS:
        ready = made.ready(algorithm(name), AlgoSection(name=name), batch)
        log_probs = (-torch.ones(batch.num_tokens) * batch.loss_mask).requires_grad_()
        made.step_loss(algorithm(name), AlgoSection(name=name), ready, log_probs).backward()
        assert torch.isfinite(log_probs.grad).all() and log_probs.grad[:3].abs().max() == 0
