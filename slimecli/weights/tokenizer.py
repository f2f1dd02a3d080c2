"""What a fast tokenizer's files say, without loading a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.errors import DataError


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """{"size", "bos_token_id", "eos_token_id", "pad_token_id"} of a fast tokenizer's files; None where not set."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{folder} has no tokenizer.json", "name a folder with a fast tokenizer")
    data = files.read_json(path)
    try:
        ids = _vocabulary(data["model"].get("vocab", {}))
        ids |= {t["content"]: t["id"] for t in data.get("added_tokens", [])}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise DataError(f"{path} is no fast tokenizer", "use the tokenizer.json that came with the weights") from None
    settings_path = folder / "tokenizer_config.json"
    settings = files.read_json(settings_path) if settings_path.is_file() else {}
    out: dict[str, Any] = {"size": max(ids.values(), default=-1) + 1}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        token = token["content"] if isinstance(token, dict) else token
        out[f"{kind}_token_id"] = ids.get(token) if token else None
    return out


def _vocabulary(vocab: dict[str, int] | list[Any]) -> dict[str, int]:
    """Token -> id; unigram models list (token, score) in id order."""
    return dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
