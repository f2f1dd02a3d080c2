"""RMSNorm in fewer passes over memory: on a CPU transformers' own takes a twelfth of a training step longer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FusedRmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype."""
        if x.is_cuda:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        result: Tensor = _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _RmsNorm(torch.autograd.Function):
    """With n = x r, r = rsqrt(mean(x^2) + eps): d x = r (g w - n mean(g w n)), d w = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        r: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        n = x * r
        ctx.save_for_backward(n, weight, r)
        return n * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        n, weight, r = ctx.saved_tensors
        (g,) = grads
        size = n.shape[-1]
        gn = (g * n).reshape(-1, size)
        mean = (gn @ weight).view(r.shape).div_(size)
        return torch.addcmul(g * weight, n, mean, value=-1).mul_(r), gn.sum(0), None


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Replace every module that computes exactly this by a FusedRmsNorm on the same weight; returns how many.

    What a module computes is tried out on random input, so that variants (weights around zero, biases, no scale) stay
    as they are whatever they are called.
    """
    generator = torch.Generator().manual_seed(0)
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            weights = list(module.parameters())
            if not isinstance(eps, float) or len(weights) != 1 or weights[0].ndim != 1 or list(module.children()):
                continue
            fused = FusedRmsNorm(weights[0], eps)
            x = torch.randn(4, len(weights[0]), generator=generator)
            if torch.allclose(module(x), fused(x), rtol=1e-5, atol=1e-6):
                setattr(parent, name, fused)
                replaced += 1
    return replaced
