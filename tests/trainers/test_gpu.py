"""The trainer on one CUDA device: bf16 compute over float32 weights, variable-length flash attention."""

from __future__ import annotations

import pytest
import torch

from slimecli.trainers import _attention
from slimecli.trainers._attention import Layout, packed_attention
from slimecli.trainers._packing import pack
from tests.models import tiny_model
from tests.trainers import made

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDE = {"hidden_size": 128, "head_dim": 32}
"""flash kernels want heads of at least 32"""


@pytest.mark.parametrize("window", [None, 4])
def test_flash_equals_tables(window, monkeypatch):
    torch.manual_seed(0)
    batch = made.batch(made.recipe())
    packing = pack(batch).to(torch.device("cuda"))
    count = len(packing.token_ids)
    q, k, v = (torch.randn(1, h, count, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    found = []
    for flash in (True, False):
        monkeypatch.setattr(_attention, "has_flash", lambda flash=flash: flash)
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=Layout(packing), sliding_window=window)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=5e-2, atol=5e-2)


def test_bf16_compute_stays_near_float32(tmp_path):
    folder = tiny_model(tmp_path / "m", **WIDE)
    batch = made.batch(made.recipe())
    full = made.trainer(folder)
    half = made.trainer(folder, "model.dtype=bfloat16")
    gap = (full.log_probs(batch) - half.log_probs(batch)).abs().sum() / batch.loss_mask.sum()
    assert 0 < gap < 0.05
    exact, rough = full.step(batch), half.step(batch)
    assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
    assert {p.dtype for p in half._parameters.values()} == {torch.float32}
    assert {t.dtype for _, t in half.weights()} == {torch.bfloat16}


def test_a_checkpoint_resumes_exactly(tmp_path):
    folder = tiny_model(tmp_path / "m", **WIDE)
    trainer = made.trainer(folder)
    batch = made.batch(made.recipe())
    trainer.step(batch)
    (tmp_path / "c").mkdir()
    trainer.save(tmp_path / "c")
    other = made.trainer(folder)
    other.load(tmp_path / "c")
    assert made.gap(made.weights(trainer), made.weights(other)) == 0
    assert other.step(batch).loss == pytest.approx(trainer.step(batch).loss, abs=1e-5)
