"""The gated delta rule in chunks is the recurrence it stands for."""

from __future__ import annotations

import pytest
import torch

from slimecli.trainers.megatron.gated_delta import CHUNK, gated_delta_rule


def one_by_one(q, k, v, log_decay, beta):
    """The definition, token by token."""
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
    out = []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_equal_single_tokens(length):
    torch.manual_seed(length)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    q, k, v = make(length, 3, 6), torch.nn.functional.normalize(make(length, 3, 6), dim=-1), make(length, 3, 5)
    inputs = [q, k, v, -make(length, 3).exp(), make(length, 3).sigmoid()]
    ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    found, expected = gated_delta_rule(*ours), one_by_one(*theirs)
    assert torch.allclose(found, expected, atol=1e-12)
    weight = make(*found.shape)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-11)
