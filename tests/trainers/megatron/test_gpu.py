"""The Megatron trainer on one CUDA device: its precision, its attention, its memory, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimecli.trainers import open_trainer
from slimecli.trainers.fsdp import FsdpTrainer
from slimecli.types import StepStats
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.megatron.conftest import tame
from tests.trainers.megatron.ranks import LIKE_SGD, megatron

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDE = {"hidden_size": 128, "head_dim": 32}
"""flash kernels want heads of at least 32"""
HALF = "model.dtype=bfloat16"
FAMILIES = ("qwen3", "glm4", "qwen3_moe", "glm4_moe", "minimax_m2", "deepseek_v3", "qwen3_5")
"""heads for the flash kernel, experts with and without a bias, latent attention, gated delta layers"""


@pytest.fixture
def folder_of(tmp_path):
    """family -> HF folder."""

    def make(family: str) -> Path:
        sizes: dict[str, Any] = {} if family == "deepseek_v3" else WIDE
        layers = 4 if family == "qwen3_5" else 3
        return tame(tiny_model(tmp_path / family, family, **sizes, num_hidden_layers=layers), family)

    return make


def opened(folder: Path, *options: str) -> Any:
    return open_trainer(made.recipe(*megatron(), *LIKE_SGD, *options), folder, total_steps=5)


def seen(trainer: Any) -> tuple[torch.Tensor, StepStats]:
    """Log-probs, and a step."""
    batch = made.batch(made.recipe())
    log_probs: torch.Tensor = trainer.log_probs(batch)
    return log_probs, trainer.step(batch)


def test_in_float32_it_does_what_fsdp_does(folder_of):
    folder = folder_of("qwen3")
    theirs = open_trainer(made.recipe(*LIKE_SGD), folder, total_steps=5)
    assert isinstance(theirs, FsdpTrainer)
    expected, step = seen(theirs)
    theirs.close()
    found, stats = seen(opened(folder))
    assert (found - expected).abs().max() < 1e-4
    assert stats.loss == pytest.approx(step.loss, abs=1e-5)
    assert stats.grad_norm == pytest.approx(step.grad_norm, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_near_single(folder_of, family):
    folder = folder_of(family)
    single, exact = seen(opened(folder))
    half, rough = seen(opened(folder, HALF))
    assert 0 < (half - single).abs().mean() < 0.08
    assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.3 if family == "qwen3_5" else 0.12)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_as_they_were_read(folder_of, family):
    """In bfloat16, but for what chooses experts."""
    folder = folder_of(family)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in opened(folder, HALF).weights():
        assert tensor.is_cuda, name
        exact = stored[name] if name.endswith("e_score_correction_bias") else stored[name].bfloat16()
        assert torch.equal(tensor.cpu().float(), exact.float()), name


@pytest.mark.parametrize(
    "more", [(), ("megatron.optimizer_cpu_offload=true", "megatron.optimizer_offload_fraction=1.0")]
)
def test_a_checkpoint_goes_on(folder_of, tmp_path, more):
    folder, out = folder_of("qwen3_moe"), tmp_path / "checkpoint"
    trainer = opened(folder, HALF, *more)
    seen(trainer)
    out.mkdir()
    trainer.save(out)
    expected, step = seen(trainer)
    other = opened(folder, HALF, *more)
    other.load(out)
    found, stats = seen(other)
    assert (found - expected).abs().max() < 1e-2
    assert stats.grad_norm == pytest.approx(step.grad_norm, rel=1e-2)


def test_asleep_it_leaves_the_device(folder_of):
    before = torch.cuda.memory_allocated()
    trainer = opened(folder_of("qwen3"), HALF)
    seen(trainer)
    batch = made.batch(made.recipe())
    expected, awake = trainer.log_probs(batch), torch.cuda.memory_allocated() - before
    trainer.sleep()
    assert torch.cuda.memory_allocated() - before < awake / 4
    trainer.wake()
    assert torch.equal(trainer.log_probs(batch), expected)


def test_policy_and_critic_take_turns(folder_of):
    ppo, folder = ("algo.name=ppo", HALF), folder_of("qwen3")
    losses = []
    for away in ("false", "true"):
        trainer = opened(folder, *ppo, f"algo.critic_offload={away}")
        batch = made.batch(made.recipe())
        values = trainer.log_probs(batch, "critic")
        stats = trainer.step(batch.replace(values=values, returns=batch.advantages))
        losses.append((stats.loss, stats.metrics["value_loss"]))
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
