"""Tiny models, made once."""

from __future__ import annotations

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Qwen3 shape: QK-norm, grouped heads, tied embedding."""
    return tiny_model(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Llama shape: untied embedding."""
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")
