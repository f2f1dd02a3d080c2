import pytest

from slimecli import files
from slimecli.data_tools.tokenizer import train_tokenizer
from slimecli.errors import UsageError
from tests.data_tools.conftest import TEXTS


def test_exact_size_round_trip_and_single_digits(tokenizer):
    assert len(tokenizer) == 300
    for text in ("12 + 34 = 46", "Übung 数学 🙂\n\ttab", "a  b", "2026"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("2026")["input_ids"]) == 4
    assert len(tokenizer("user")["input_ids"]) == len(tokenizer("assistant")["input_ids"]) == 1


def test_special_tokens(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer("<|im_start|><|im_end|>")["input_ids"]) == 2
    ids = tokenizer("46<|im_end|>")["input_ids"]
    assert tokenizer.decode([*ids, 299], skip_special_tokens=True) == "46"


def test_same_texts_same_bytes(tokenizer_dir, tmp_path):
    train_tokenizer(iter(TEXTS), 300, tmp_path / "b")
    assert files.sha256(tmp_path / "b") == files.sha256(tokenizer_dir)


def test_too_small(tmp_path):
    with pytest.raises(UsageError, match="vocabulary of 258 is too small"):
        train_tokenizer(TEXTS, 258, tmp_path)
