"""New random weights in the shape of a registry entry: a complete HF folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec, get_spec
from slimecli.seeds import derive_seed
from slimecli.weights.hf import save_hf_folder
from slimecli.weights.maps import hf_shapes


def init_model(
    spec_or_name: ModelSpec | str,
    out: Path,
    *,
    seed: int = 0,
    std: float = 0.02,
    tokenizer_dir: Path | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Write config, weights and tokenizer into `out`.

    Args:
        seed: each tensor is drawn from (seed, its name), so a change of shape elsewhere leaves it as it is.
        std: standard deviation of matrices; norms are 1, biases 0.
        tokenizer_dir: folder with tokenizer files to copy; its vocabulary becomes the model's.
        vocab_size: rows of the embedding; None: the tokenizer's, or the registry's without one.

    Returns the manifest of save_hf_folder.
    """
    spec = get_spec(spec_or_name) if isinstance(spec_or_name, str) else spec_or_name
    tokens = read_tokenizer(tokenizer_dir) if tokenizer_dir is not None else {}
    used = tokens.get("size", 0)
    rows = vocab_size or used or spec.vocab
    if rows < used:
        raise DataError(f"{rows} embedding rows for a tokenizer of {used}", f"ask for at least {used}")
    spec = dataclasses.replace(spec, vocab=rows)
    out.mkdir(parents=True, exist_ok=True)
    kind = str(dtype).removeprefix("torch.")
    special = {k: tokens[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if tokens.get(k) is not None}
    manifest = save_hf_folder(_draw(spec, seed, std), out, like=tokenizer_dir or out, dtype=dtype)
    files.write_json(out / "config.json", {**spec.to_config(kind), **special})
    files.write_json(out / "generation_config.json", {"do_sample": True, **special})
    return manifest


def _draw(spec: ModelSpec, seed: int, std: float) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in hf_shapes(spec).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        elif name.endswith(".bias"):
            yield name, torch.zeros(shape)
        else:
            generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
            yield name, torch.empty(shape).normal_(0.0, std, generator=generator)


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """{"size", "bos_token_id", "eos_token_id", "pad_token_id"} of a fast tokenizer's files; None where not set."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{folder} has no tokenizer.json", "name a folder with a fast tokenizer")
    data = files.read_json(path)
    ids = _vocabulary(data["model"].get("vocab", {}))
    ids |= {t["content"]: t["id"] for t in data.get("added_tokens", [])}
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
