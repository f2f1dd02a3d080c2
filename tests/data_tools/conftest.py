"""One small trained tokenizer for all data tests."""

from __future__ import annotations

import pytest

TEXTS = ["12 + 34 =", "2+4=6 1+3=4 =46", "weather in Paris", "sunny", '{"name": "add"}'] * 3


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    from slimecli.data_tools.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)
