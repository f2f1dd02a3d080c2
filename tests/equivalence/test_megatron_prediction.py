"""`slime run` of a model with a prediction layer, which the Megatron trainer trains and the embedded engine holds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import tests.megatron  # noqa: F401 - megatron-core is imported once, and not by every fork
from tests.forked import slime, spawn_slime, succeed
from tests.models import as_on_the_hub, tiny_model
from tests.tiny_run import assert_same_weights, metrics, sets, weights

STEPS = 3
SMALL = (
    f"steps={STEPS}",
    "sft.steps=0",
    "data.count=60",
    "data.holdout=4",
    "model.dtype='float32'",
    "model.source='path'",
    "model.name=''",
    "model.tokenizer_vocab=0",
    "trainer.backend='megatron'",
    "trainer.adam_eps=1e-3",  # rounding in a gradient near zero must not become a step
    "megatron.mtp_loss_scaling_factor=0.3",
)
PIPELINE = ("--", "--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "1")
LAYER = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with a prediction layer."""
    return as_on_the_hub(tiny_model(tmp_path_factory.mktemp("mimo"), "mimo"), "mimo")


def words(hub, *extra):
    return ("run", "--recipe", "quickstart", "--run", "r", *sets(*SMALL, f"model.path='{hub}'", *extra))


@pytest.fixture(scope="module")
def alone(hub, tmp_path_factory):
    """One process, and how many durable writes that takes."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = succeed(*words(hub), "--until", "loop", folder=folder)
    return folder / "runs" / "r", outcome.fsyncs


def test_the_layer_is_trained_and_reaches_the_engine(hub, alone):
    losses = [row["train/mtp_loss"] for row in metrics(alone[0]) if "train/mtp_loss" in row]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    before, after = load_file(hub / "model.safetensors"), weights(alone[0] / f"weights/v{STEPS:06d}")
    assert before.keys() == after.keys()
    ours = [name for name in before if name.startswith(LAYER)]
    assert len(ours) == 16
    assert [name for name in ours if torch.equal(before[name], after[name])] == []


def test_killed_and_resumed_equals_straight_and_not_without_the_loss(hub, alone, tmp_path):
    kill_at = alone[1] * 3 // 4
    assert slime(*words(hub), "--until", "loop", folder=tmp_path, kill_at=kill_at).code == -9
    assert 0 < len(metrics(tmp_path / "runs" / "r")) < STEPS
    refused = slime("run", "--resume", "--run", "r", "--set", "megatron={}", folder=tmp_path)
    assert refused.code and "its prediction layers were trained, and" in refused.err, refused.err
    succeed("run", "--resume", "--run", "r", "--set", "megatron.mtp_loss_scaling_factor=0.3", folder=tmp_path)
    run = tmp_path / "runs" / "r"
    assert metrics(run) == metrics(alone[0])
    assert_same_weights(run / f"weights/v{STEPS:06d}", alone[0] / f"weights/v{STEPS:06d}")


@pytest.mark.ray
def test_two_processes_have_the_same_curve(hub, alone, tmp_path):
    ray = ("cluster.backend='ray'", "trainer.processes=2")
    succeed(*words(hub, *ray), *PIPELINE, folder=tmp_path, run=spawn_slime)
    run = tmp_path / "runs" / "r"
    for one, two in zip(metrics(run), metrics(alone[0]), strict=True):
        for name in ("train/loss", "train/mtp_loss", "rollout/reward"):
            assert one.get(name, 0) == pytest.approx(two.get(name, 0), abs=1e-5), (one["step"], name)
    left, right = (weights(r / f"weights/v{STEPS:06d}") for r in (run, alone[0]))
    assert left.keys() == right.keys()
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-5
