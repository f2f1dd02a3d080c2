"""GRPO and SFT losses by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slimecli.algos import LossInputs, algorithm
from slimecli.batch import from_groups
from slimecli.recipe_algo import AlgoSection
from slimecli.types import Sample, SampleStatus


def inputs(log_probs, **changes):
    """One sample of three positions, the last one not trained."""
    fields = {
        "log_probs": torch.tensor(log_probs, requires_grad=True),
        "entropy": torch.zeros(3),
        "old_log_probs": None,
        "ref_log_probs": None,
        "rollout_log_probs": None,
        "advantages": torch.tensor([2.0, 2.0, 0.0]),
        "loss_mask": torch.tensor([1.0, 1.0, 0.0]),
        "cu_seqlens": torch.tensor([0, 3]),
    }
    return LossInputs(**{**fields, **changes})


def test_advantages_reach_every_trained_position():
    rows = [
        Sample(tokens=[1, 2, 3], response_length=2, reward=r, group_index=0, status=SampleStatus.COMPLETED)
        for r in (1.0, 0.0)
    ]
    rows[1].loss_mask = [0, 1]
    batch = from_groups([rows], temperature=1.0)
    section = AlgoSection(std_normalization=False)
    assert algorithm("grpo").advantages(batch, section).tolist() == [0.5, 0.5, 0, 0, -0.5, 0]
    assert algorithm("sft").advantages(batch, section).tolist() == [1, 1, 0, 0, 1, 0]


def test_on_policy_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    made = inputs([-1.0, -2.0, 0.0])
    loss, metrics = algorithm("grpo").loss(made, AlgoSection())
    assert loss.tolist() == [-2, -2, 0]
    loss.sum().backward()
    assert made.log_probs.grad.tolist() == [-2, -2, 0]
    assert metrics["ppo_kl"].abs().max() == 0
    assert metrics["clip_fraction"].sum() == 0
    assert "kl" not in metrics


def test_clip_high_and_low():
    made = inputs([-1.0, -2.0, 0.0], old_log_probs=torch.tensor([-1.0 - math.log(1.5), -2.0 - math.log(1.1), 0.0]))
    loss, metrics = algorithm("grpo").loss(made, AlgoSection(eps_clip=0.2, eps_clip_high=0.28))
    assert loss.tolist() == pytest.approx([-2 * 1.28, -2 * 1.1, 0])
    assert metrics["clip_fraction"].tolist() == [1, 0, 0]
    assert metrics["ppo_kl"].tolist() == pytest.approx([-math.log(1.5), -math.log(1.1), 0], abs=1e-6)
    loss.sum().backward()
    assert made.log_probs.grad.tolist() == pytest.approx([0, -2.2, 0])


def test_kl_and_entropy_enter_the_loss():
    reference = torch.tensor([-1.5, -2.0, 0.0])
    made = inputs([-1.0, -2.0, 0.0], ref_log_probs=reference, entropy=torch.tensor([1.0, 2.0, 0.0]))
    section = AlgoSection(kl_coef=0.1, kl_type="k3", entropy_coef=0.01)
    loss, metrics = algorithm("grpo").loss(made, section)
    kl = math.exp(-0.5) - 0.5
    assert loss.tolist() == pytest.approx([-2 + 0.1 * kl - 0.01, -2 - 0.02, 0])
    assert metrics["kl"].tolist() == pytest.approx([kl, 0, 0])
    assert metrics["entropy"].tolist() == [1, 2, 0]


def test_sft_is_negative_log_likelihood():
    loss, _ = algorithm("sft").loss(inputs([-1.0, -2.0, 0.0]), AlgoSection(name="sft"))
    assert loss.tolist() == [1, 2, 0]
    assert not algorithm("sft").needs_rollout
