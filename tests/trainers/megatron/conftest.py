"""Tiny models and what a trainer in one process makes of them, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.models import tiny_model
from tests.trainers.megatron import ranks


@pytest.fixture(scope="session")
def model_of(tmp_path_factory) -> Callable[..., Path]:
    """(family, layers) -> HF folder."""
    found: dict[tuple[str, int], Path] = {}

    def make(family: str, layers: int = 3) -> Path:
        if (family, layers) not in found:
            folder = tmp_path_factory.mktemp(family)
            found[family, layers] = tame(tiny_model(folder, family, num_hidden_layers=layers), family)
        return found[family, layers]

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[..., ranks.Observed]:
    """`ranks.observe`, remembered."""
    found: dict[Any, ranks.Observed] = {}

    def make(folder: Path, overrides: tuple[str, ...], **batches: Any) -> ranks.Observed:
        key = (folder, overrides, *batches.items())
        if key not in found:
            found[key] = ranks.observe(folder, overrides, **batches)
        return found[key]

    return make


def tame(folder: Path, family: str) -> Path:
    """Norms that are stored less one are brought near one: where all double their input, rounding is all one sees."""
    if family.startswith(("qwen3_next", "qwen3_5")):
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if name.endswith("norm.weight") and "linear_attn" not in name and "visual" not in name:
                weights[name] -= 1
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def initial(folder: Path) -> dict[str, np.ndarray]:
    """The folder's weights."""
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
