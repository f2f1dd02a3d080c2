"""The fused RMSNorm against its definition, and which modules it replaces."""

from __future__ import annotations

import torch
from torch import nn

from slimecli.trainers._norm import FusedRmsNorm, fuse_norms


class Rms(nn.Module):
    def __init__(self, size, shift=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.variance_epsilon = 1e-6
        self.shift = shift

    def forward(self, x):
        return (self.weight + self.shift) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_values_and_gradients():
    torch.manual_seed(0)
    norm = FusedRmsNorm(nn.Parameter(torch.rand(6, dtype=torch.float64)), 1e-3)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * norm.weight
    assert torch.allclose(norm(x), expected)
    strided = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.gradcheck(lambda a: norm(a.transpose(1, 2)), (strided,))
    (given,) = torch.autograd.grad(norm(x).square().sum(), norm.weight)
    (wanted,) = torch.autograd.grad(expected.square().sum(), norm.weight)
    assert torch.allclose(given, wanted)


def test_only_modules_that_compute_the_same_are_replaced():
    model = nn.ModuleDict({"rms": Rms(8), "gemma": Rms(8, 1.0), "layer": nn.LayerNorm(8), "linear": nn.Linear(8, 8)})
    weight = model["rms"].weight
    assert fuse_norms(model) == 1
    assert isinstance(model["rms"], FusedRmsNorm)
    assert model["rms"].weight is weight
    assert isinstance(model["gemma"], Rms)
