"""Checkpoints that several tests of this folder start from, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.megatron.models import hub_folder


@pytest.fixture(scope="session")
def hub(tmp_path_factory) -> Callable[..., Path]:
    """(family, dtype) -> HF folder as on the hub."""

    @cache
    def make(family: str, dtype: str = "bfloat16") -> Path:
        return hub_folder(tmp_path_factory.mktemp(family) / "hf", family, dtype)

    return make


@pytest.fixture(scope="session")
def converted(hub) -> Callable[..., Path]:
    """(family, dtype) -> the Megatron checkpoint that slime makes of that folder."""
    from slimecli.weights.convert import hf_to_torch_dist

    @cache
    def make(family: str, dtype: str = "bfloat16") -> Path:
        hf = hub(family, dtype)
        hf_to_torch_dist(hf, hf.parent / "megatron")
        return hf.parent / "megatron" / "release"

    return make
