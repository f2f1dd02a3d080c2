"""Schedules, weight decay and clipping."""

from __future__ import annotations

import math

import pytest
import torch

from slimecli.recipe_sections import TrainerSection
from slimecli.trainers._optimizer import clip_gradient, gradient_norm, lr_at, make_optimizer


def test_warm_up_and_schedules():
    section = TrainerSection(lr=1.0, warmup_steps=4, lr_schedule="cosine", min_lr_ratio=0.1)
    assert [lr_at(s, 24, section) for s in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert lr_at(14, 24, section) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_at(24, 24, section) == pytest.approx(0.1)
    assert lr_at(99, 24, section) == pytest.approx(0.1)
    linear = section.model_copy(update={"lr_schedule": "linear"})
    assert lr_at(9, 24, linear) == pytest.approx(0.1 + 0.9 * 0.75)
    constant = TrainerSection(lr=0.5)
    assert {lr_at(s, 10, constant) for s in range(1, 12)} == {0.5}


def test_one_step_is_adamw_with_decay_on_matrices_only():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    section = TrainerSection(lr=0.1, weight_decay=0.5, beta1=0.9, beta2=0.99, adam_eps=1e-8)
    optimizer = make_optimizer({"m": matrix, "v": vector}, section)
    matrix.grad, vector.grad = torch.full((2, 2), 3.0), torch.full((2,), -2.0)
    optimizer.step()
    assert matrix[0, 0].item() == pytest.approx(1 - 0.1 * 0.5 - 0.1, rel=1e-5)
    assert vector[0].item() == pytest.approx(1 + 0.1, rel=1e-5)


def test_norm_and_clipping():
    parameters = {"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(1))}
    parameters["a"].grad, parameters["b"].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = gradient_norm(parameters)
    assert norm.item() == pytest.approx(5)
    clip_gradient(norm, parameters, 0.0)
    assert parameters["b"].grad.item() == 4
    clip_gradient(norm, parameters, 1.0)
    clipped = math.hypot(parameters["a"].grad[0].item(), parameters["b"].grad.item())
    assert clipped == pytest.approx(1, rel=1e-5)
