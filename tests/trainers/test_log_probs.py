"""Chunked log-probs and entropy against autograd on whole logits."""

from __future__ import annotations

import pytest
import torch

from slimecli.trainers._log_probs import token_log_probs


def reference(hidden, weight, targets, temperature):
    log_p = (hidden @ weight.T / temperature).log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
def test_values_and_gradients_equal_autograd(chunk, use):
    torch.manual_seed(0)
    targets = torch.randint(31, (13,))
    up = torch.randn(2, 13)
    up *= torch.tensor([use != "entropy", use != "log_probs"])[:, None]
    results = []
    for function in (reference, lambda *a: token_log_probs(*a[:3], temperature=a[3], chunk=chunk)):
        torch.manual_seed(1)
        hidden, weight = torch.randn(13, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
        values = function(hidden, weight, targets, 0.7)
        used = [(v * u).sum() for v, u in zip(values, up, strict=True) if u.abs().sum() > 0]
        sum(used).backward()
        results.append([*values, hidden.grad, weight.grad])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)


def test_no_rows():
    weight = torch.randn(5, 3, requires_grad=True)
    log_probs, entropy = token_log_probs(
        torch.zeros(0, 3, requires_grad=True), weight, torch.zeros(0, dtype=torch.int64), temperature=1.0, chunk=8
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad.abs().sum() == 0


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0, 0]), temperature=1.0, chunk=8)
    assert log_probs.tolist() == [0, -2000]
    assert entropy.tolist() == [0, 0]
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()


def test_whole_logits_are_never_held():
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Watch.largest = max(Watch.largest, out.numel())
            return out

    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    with Watch():
        log_probs, _ = token_log_probs(hidden, weight, torch.zeros(512, dtype=torch.int64), temperature=1.0, chunk=32)
        log_probs.sum().backward()
    assert Watch.largest <= 32 * 100
