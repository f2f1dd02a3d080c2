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
from slimecli.weights.maps import rules_of
from slimecli.weights.tokenizer import read_tokenizer


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
    # stated even where there is none: some families' defaults lie beyond a small vocabulary
    special = {k: tokens.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    manifest = save_hf_folder(_draw(spec, seed, std, dtype), out, like=tokenizer_dir or out)
    config = {**spec.to_config(kind), **special}
    if spec.family.nested:
        config[spec.family.nested] |= special
    files.write_json(out / "config.json", config)
    known = {k: v for k, v in special.items() if v is not None}
    files.write_json(out / "generation_config.json", {"do_sample": True, **known})
    return {**manifest, "dtype": kind}


def _draw(spec: ModelSpec, seed: int, std: float, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for rule in rules_of(spec):
        for name, shape in rule.hf.items():
            tensor = _constant(name, shape, spec)
            if tensor is None:
                generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
                tensor = torch.empty(shape).normal_(0.0, std, generator=generator)
            yield name, tensor if rule.keep_dtype else tensor.to(dtype)


def _constant(name: str, shape: tuple[int, ...], spec: ModelSpec) -> torch.Tensor | None:
    """What is not drawn: norms are 1 (the gated norm also where others are stored less one), biases 0; gated-delta
    decay rates spread evenly over (0, 16], their time steps begin at softplus(1)."""
    if name.endswith("norm.weight"):
        return (
            torch.zeros(shape)
            if spec.unit_norms and not name.endswith("linear_attn.norm.weight")
            else torch.ones(shape)
        )
    if name.endswith("A_log"):
        return torch.linspace(16 / shape[0], 16, shape[0]).log()
    if name.endswith("dt_bias"):
        return torch.ones(shape)
    return torch.zeros(shape) if name.endswith("bias") else None
