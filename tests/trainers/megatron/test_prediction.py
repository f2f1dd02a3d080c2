"""Prediction layers that are not trained reach engines and checkpoints bit for bit as the model's folder has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from slimecli.trainers import open_trainer
from slimecli.weights.convert import torch_dist_to_hf
from slimecli.weights.torch_dist import find_iteration
from tests.megatron.expected import Expected
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, megatron_model, tensors_of
from tests.megatron.test_load import content_metadata
from tests.models import as_on_the_hub, tiny_model
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

FAMILIES = ("glm4_moe", "mimo", "deepseek_v3", "qwen3_next", "qwen3_5")
TP2 = megatron("tensor_model_parallel_size=2", "sequence_parallel=true", processes=2)
COPIES = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """family -> (folder with a prediction layer, its tensors, the names of the layer's)."""
    found: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in found:
            folder = tiny_model(tmp_path_factory.mktemp(family), family)
            plain = set(load_file(folder / "model.safetensors"))
            stored = load_file(as_on_the_hub(folder, family) / "model.safetensors")
            found[family] = folder, stored, set(stored) - plain
        return found[family]

    return make


def pp2(family: str) -> tuple[str, ...]:
    first = 2 if family.startswith("qwen") else 1
    return megatron("pipeline_model_parallel_size=2", f"decoder_first_pipeline_num_layers={first}", processes=2)


def a_step(folder: Path, out: Path | None, options: tuple[str, ...]) -> dict[str, Any]:
    """Weights before and after a step, and log-probs and gradient norm of it; a checkpoint after it."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    before, batch = weights_of(trainer), made.batch(recipe)
    log_probs = trainer.log_probs(batch).numpy().copy()
    norm = trainer.step(batch).grad_norm
    if out is not None:
        trainer.save(out)
    return {"before": before, "after": weights_of(trainer), "log_probs": log_probs, "norm": norm}


def resumed(folder: Path, out: Path, options: tuple[str, ...]) -> dict[str, np.ndarray]:
    trainer = open_trainer(made.recipe(*options), folder, total_steps=10)
    trainer.load(out)
    return weights_of(trainer)


def without_the_layer(folder: Path, stored: dict[str, torch.Tensor], layer: set[str]) -> Path:
    """A folder with the other weights, and a config that says no more."""
    kept = {name: tensor for name, tensor in stored.items() if name not in layer}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def on_ranks(work: Any, folder: Path, out: Path | None, options: tuple[str, ...]) -> Any:
    return run_ranks(world_of(options), work, folder, out, options, join=False)[0]


def same(a: np.ndarray, b: torch.Tensor) -> bool:
    return np.array_equal(a, b.float().numpy())


@pytest.mark.parametrize("layout", ["one", "TP2", "PP2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_published_as_they_are(hub, family, layout):
    folder, stored, layer = hub(family)
    options = {"one": megatron(), "TP2": TP2, "PP2": pp2(family)}[layout]
    seen = on_ranks(a_step, folder, None, options)
    assert seen["before"].keys() == seen["after"].keys() == stored.keys()
    assert [name for name in stored if not same(seen["before"][name], stored[name])] == []
    assert [name for name in layer - COPIES if not same(seen["after"][name], stored[name])] == []
    for copy, of in zip(sorted(COPIES & layer), ("model.embed_tokens.weight", "lm_head.weight"), strict=False):
        assert np.array_equal(seen["after"][copy], seen["after"][of])
        assert not same(seen["after"][copy], stored[copy])


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_the_policy_learns_as_without_them(hub, tmp_path, family):
    folder, stored, layer = hub(family)
    plain = without_the_layer(tiny_model(tmp_path, family), stored, layer)
    seen, expected = (on_ranks(a_step, where, None, megatron()) for where in (folder, plain))
    assert np.array_equal(seen["log_probs"], expected["log_probs"])
    assert seen["norm"] == expected["norm"]
    assert set(seen["after"]) - set(expected["after"]) == layer
    assert all(np.array_equal(seen["after"][name], value) for name, value in expected["after"].items())


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "qwen3_next"])
def test_checkpoints_have_them(hub, tmp_path, family):
    folder, _, layer = hub(family)
    out = tmp_path / "checkpoint"
    out.mkdir()
    saved = on_ranks(a_step, folder, out, TP2)["after"]
    torch_dist_to_hf(out, tmp_path / "hf")
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == saved.keys() - COPIES
    assert layer - COPIES <= converted.keys()
    assert all(same(saved[name], tensor) for name, tensor in converted.items())
    loaded = on_ranks(resumed, folder, out, pp2(family))
    assert loaded.keys() == saved.keys()
    assert all(np.array_equal(loaded[name], value) for name, value in saved.items())


def load_by_megatron(world: World, hf: Path, folder: Path) -> None:
    """Megatron-LM's way, into a model of its own that has prediction layers."""
    config = config_of(hf)
    model = megatron_model(config, world)
    state = {"model": model.sharded_state_dict(metadata=content_metadata(folder))}
    loaded, _, lacking = dist_checkpointing.load(state, str(folder), strict="return_all")
    assert not lacking
    model.load_state_dict(loaded["model"])
    found, expected = model.state_dict(), Expected(tensors_of(hf), config, PADDED).of(model)
    names = [name for name in expected if name.startswith("mtp.")]
    assert len(names) > 8
    assert [name for name in names if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_megatron_itself_loads_them(hub, tmp_path, family):
    folder, _, _ = hub(family)
    on_ranks(a_step, folder, tmp_path, megatron())
    for world in (World(), World(tp=2)):
        run(world, load_by_megatron, folder, find_iteration(tmp_path))
