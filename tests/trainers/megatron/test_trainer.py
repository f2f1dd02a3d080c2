"""What goes wrong is said and changes nothing; half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimecli.errors import SlimeError, UsageError
from slimecli.trainers import open_trainer
from slimecli.trainers.megatron import arguments, weights
from slimecli.weights.hf import HfFolder
from tests.models import as_on_the_hub, tiny_model
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import LIKE_SGD, megatron, observe, weights_of, world_of
from tests.trainers.processes import run_ranks

TP2 = megatron("tensor_model_parallel_size=2", processes=2)
PP2 = megatron("pipeline_model_parallel_size=2", "decoder_first_pipeline_num_layers=1", processes=2)
ONE, DP2 = megatron(), megatron(processes=2)
LAYOUTS = pytest.mark.parametrize("layout", [ONE, TP2, PP2, DP2], ids=["one", "TP2", "PP2", "DP2"])


def on_ranks(work: Any, folder: Path, *options: str) -> list[Any]:
    return run_ranks(world_of(options), work, folder, options, join=False)


def a_step_with_nan(folder: Path, options: tuple[str, ...]) -> tuple[str, bool, float]:
    """What is said, whether all is as before, and the loss of a good step afterwards."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    before = weights_of(trainer)
    broken = batch.advantages.clone()
    broken[int(batch.loss_mask.nonzero()[-1])] = torch.nan
    with pytest.raises(SlimeError) as caught:
        trainer.step(batch.replace(advantages=broken))
    after = weights_of(trainer)
    same = all(np.array_equal(before[name], after[name]) for name in before)
    return str(caught.value), same, trainer.step(batch).grad_norm


@LAYOUTS
def test_a_nan_gradient_leaves_the_weights_as_they_were(model_of, layout):
    folder = model_of("qwen3")
    expected = observe(folder, megatron())["stats"][0]["grad_norm"]
    for said, same, norm in on_ranks(a_step_with_nan, folder, *layout):
        assert "step 1: the gradient of" in said
        assert "NaN" in said
        assert same
        assert norm == pytest.approx(expected, rel=1e-5)


def every_misuse(folder: Path, options: tuple[str, ...]) -> list[str]:
    """What is said of each."""
    recipe = made.recipe(*options, "algo.kl_coef=0.1")
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    said = []
    for misuse in (
        lambda: trainer.step(batch),
        lambda: trainer.step(batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))),
        lambda: open_trainer(made.recipe(*options), folder, total_steps=10).log_probs(batch, "reference"),
    ):
        with pytest.raises(SlimeError) as caught:
            misuse()
        said.append(str(caught.value))
    return said


def test_misuse_is_told(model_of):
    [said] = on_ranks(every_misuse, model_of("qwen3"), *ONE)
    assert "no ref_log_probs" in said[0]
    assert "no token of the batch is trained on" in said[1]
    assert "holds no reference model" in said[2]


def test_every_rank_answers(model_of):
    """Rank 0 is what the loop asks, but whoever asks gets the same."""

    def answers(folder: Path, options: tuple[str, ...]) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        recipe = made.recipe(*options)
        trainer = open_trainer(recipe, folder, total_steps=10)
        batch = made.batch(recipe)
        return trainer.log_probs(batch).numpy().copy(), trainer.step(batch), weights_of(trainer)

    first, second = on_ranks(answers, model_of("qwen3"), *PP2)
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    assert all(np.array_equal(first[2][name], second[2][name]) for name in first[2])


def given_by_others(folder: Path, options: tuple[str, ...]) -> set[str]:
    """Devices on which weights are gathered by a rank that gives nothing, as all but one data-parallel rank."""
    trainer = open_trainer(made.recipe(*options), folder, total_steps=10)
    chunks = [chunk.to("meta") for chunk in trainer._policy.bare]
    weights._replica = lambda shard: (0, 0, 1)
    weights._agreed_rows = lambda shards: 384
    weights._check_given = lambda bucket, given: None
    tensors = weights.hf_tensors(chunks, trainer._trained, torch.float32, HfFolder(folder))
    return {tensor.device.type for _, tensor in tensors}


def test_a_rank_that_gives_nothing_gathers_on_the_models_device(model_of):
    """NCCL takes no others. There is no second device here but one without memory."""
    assert on_ranks(given_by_others, model_of("qwen3"), *ONE) == [{"meta"}]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", ONE), ("qwen3", TP2), ("qwen3_moe", ONE), ("deepseek_v3", DP2)]
)
def test_half_precision_is_near_single(model_of, monkeypatch, family, layout):
    """A CPU trains in float32; in the dtype of a GPU the same code runs, and rounds."""
    folder = model_of(family)
    options = ("algo.kl_coef=0.1", *LIKE_SGD)
    if family != "qwen3":
        layout = (*layout, "megatron.sequence_parallel=false")
    single = observe(folder, (*options, *layout))
    as_on_a_gpu(monkeypatch)
    half = observe(folder, (*options, *layout))
    off = [np.abs(a - b) for a, b in zip(half["log_probs"], single["log_probs"], strict=True)]
    # where rounding makes a token pass through another expert, its log-prob is another one
    assert 1e-4 < max(o.max() for o in off[:2]) < (0.2 if family == "qwen3" else 2)
    assert max(o.mean() for o in off) < 0.05
    assert half["stats"][0]["grad_norm"] == pytest.approx(single["stats"][0]["grad_norm"], rel=0.05)
    start = initial(folder)
    for name, weight in single["weights"].items():
        moved, theirs = weight - start[name], half["weights"][name] - start[name]
        if np.linalg.norm(moved) > 0.05:
            agreement = float((moved * theirs).sum() / np.linalg.norm(moved) / np.linalg.norm(theirs))
            assert agreement > (0.95 if family == "qwen3" else 0.9), (name, agreement)


def test_gated_delta_in_half_precision(model_of, monkeypatch):
    """Its gradients lose more: transformers in bfloat16 has the same norm, 8% off that in float32."""
    folder = model_of("qwen3_5", 4)
    single = observe(folder, (*LIKE_SGD, *TP2))
    as_on_a_gpu(monkeypatch)
    half = observe(folder, (*LIKE_SGD, *TP2))
    off = np.abs(half["log_probs"][0] - single["log_probs"][0])
    assert off.max() > 1e-4
    assert off.mean() < 0.05
    assert half["stats"][0]["grad_norm"] == pytest.approx(single["stats"][0]["grad_norm"], rel=0.12)


def test_what_corrects_the_choice_of_experts_stays_float32(tmp_path, monkeypatch):
    """Rounded to bfloat16, a router would choose others than in the engine, which has it as the folder does."""
    folder = as_on_the_hub(tiny_model(tmp_path, "deepseek_v3"), "deepseek_v3")
    as_on_a_gpu(monkeypatch)
    [published] = on_ranks(published_at_once, folder, *ONE, "model.dtype=bfloat16")
    stored = initial(folder)
    names = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(names) == 3
    for name in names:
        assert published[name].dtype == np.float32
        assert np.array_equal(published[name], stored[name]), name
        assert not np.array_equal(torch.tensor(stored[name]).bfloat16().float().numpy(), stored[name])


def published_at_once(folder: Path, options: tuple[str, ...]) -> dict[str, np.ndarray]:
    trainer = open_trainer(made.recipe(*options), folder, total_steps=10)
    return {name: tensor.numpy() for name, tensor in trainer.weights() if tensor.dtype == torch.float32}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in bfloat16, which a CPU does not train in."""
    plain = arguments._transformer, arguments._optimizer
    half = {"bf16": True, "params_dtype": "bfloat16"}
    monkeypatch.setattr(arguments, "_transformer", lambda *a: {**plain[0](*a), **half, "pipeline_dtype": "bfloat16"})
    monkeypatch.setattr(arguments, "_optimizer", lambda *a: {**plain[1](*a), **half})


def test_families_without_layers_here_are_refused(model_of):
    with pytest.raises(UsageError, match="a sparse-attention indexer"):
        open_trainer(made.recipe(*megatron()), model_of("glm_moe_dsa"), total_steps=1)
