"""Prediction layers (MTP) in a model's folder: the embedded engine holds and proves them, and computes without."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.model import Decoder
from slimecli.engines.embedded.weights import WeightsRefused
from slimecli.protocols import WeightUpdate
from slimecli.weights.fingerprint import fingerprint
from tests.models import as_on_the_hub, edit_json, tiny_model

ASK = {
    "input_ids": [[5, 6, 7], [9]],
    "sampling_params": {"temperature": 0, "max_new_tokens": 6},
    "return_logprob": True,
}


def hub(folder: Path, seed: int = 0) -> Path:
    return as_on_the_hub(tiny_model(folder, "mimo", seed=seed), "mimo")


@pytest.fixture
def engine(tmp_path):
    return EmbeddedEngine(hub(tmp_path / "hub"), slots=3, max_context=96)


def answers(engine: EmbeddedEngine) -> list[tuple[list[int], list[float]]]:
    replies = asyncio.run(engine.generate(ASK))
    return [(r["output_ids"], [x[0] for x in r["meta_info"]["output_token_logprobs"]]) for r in replies]


def push(engine: EmbeddedEngine, tensors: dict[str, torch.Tensor], version: int = 1) -> str:
    update = WeightUpdate(kind="in_process", version=version, tensors=tensors)
    return asyncio.run(engine.update_weights(update)).fingerprint


def test_answers_are_those_of_the_model_without_them(engine, tmp_path):
    assert isinstance(engine.model, Decoder)
    plain = tiny_model(tmp_path / "plain", "mimo")
    assert answers(engine) == answers(EmbeddedEngine(plain, slots=3, max_context=96))
    reference = Qwen2ForCausalLM.from_pretrained(plain)
    for prompt, (found, _) in zip(ASK["input_ids"], answers(engine), strict=True):
        expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
        assert found == expected[0, len(prompt) :].tolist()


def test_the_fingerprint_covers_them(engine, tmp_path):
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    assert asyncio.run(engine.weights.fingerprint()) == fingerprint(stored.items())
    others = load_file(hub(tmp_path / "other", seed=1) / "model.safetensors")
    assert push(engine, others) == fingerprint(others.items())
    moved = {**others, "model.mtp_layers.0.input_proj.weight": others["model.mtp_layers.0.input_proj.weight"] + 1}
    before = answers(engine)
    assert push(engine, moved, 2) == fingerprint(moved.items()) != fingerprint(others.items())
    assert answers(engine) == before


def test_a_trainer_may_leave_them_out(engine, tmp_path):
    others = load_file(tiny_model(tmp_path / "other", "mimo", seed=1) / "model.safetensors")
    assert push(engine, others) == fingerprint(others.items())


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.mtp_layers.1.input_proj.weight", (64, 128), "unknown weight 'model.mtp_layers.1.input_proj.weight'"),
        ("model.mtp_layers.0.input_proj.bias", (64,), "unknown weight 'model.mtp_layers.0.input_proj.bias'"),
        ("model.mtp_layers.0.input_proj.weight", (64, 64), r"has shape \[64, 64\], this model needs \[64, 128\]"),
    ],
)
def test_nothing_else_comes_along(engine, tmp_path, name, shape, said):
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    with pytest.raises(WeightsRefused, match=said):
        push(engine, {**stored, name: torch.zeros(shape)})


def test_a_folder_that_states_none_has_none(tmp_path):
    folder = hub(tmp_path)
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(WeightsRefused, match=r"unknown weight 'model\.mtp_layers\.0"):
        EmbeddedEngine(folder, slots=3, max_context=96)
