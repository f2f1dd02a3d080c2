"""Is this HF folder the model it says it is? Answered from headers and config alone."""

from __future__ import annotations

import re
from pathlib import Path

from slimecli import console
from slimecli.errors import DataError, SlimeError
from slimecli.model_specs import ModelSpec, from_config
from slimecli.weights.maps import fit, hf_shapes
from slimecli.weights.maps.rule import Shape
from slimecli.weights.quant import Weights, open_weights
from slimecli.weights.tokenizer import read_tokenizer

_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
"""buffers that old checkpoints carry and every loader computes anew"""
_LAYER = re.compile(r".*?layers\.\d+\.")


def spec_of(folder: Weights) -> ModelSpec:
    """The spec that the folder's config describes; without prediction layers if none of their weights are there."""
    return fit(from_config(folder.config(), name=folder.path.name), folder.names)


def extra_names(folder: Weights, spec: ModelSpec) -> list[str]:
    """Tensors that may stand in a folder of this model besides its weights."""
    also = {"lm_head.weight"} if spec.tied else set()
    return [n for n in folder.names if n in also or _HARMLESS.search(n)]


def weight_problems(folder: Weights, spec: ModelSpec) -> list[str]:
    """Missing, extra and misshapen tensors; renamed, transposed and swapped ones are called so where shapes tell."""
    wanted = hf_shapes(spec, folder.shapes)
    ignored = set(extra_names(folder, spec))
    missing = [n for n in wanted if n not in folder.entries]
    extra = [n for n in folder.names if n not in wanted and n not in ignored]
    out = []
    if missing:
        note = ""
        if len(missing) == len(extra) == 1 and folder.entries[extra[0]].shape == wanted[missing[0]]:
            note = f" (renamed to {extra[0]}?)"
        out.append(f"missing {_some(missing)}{note}")
    if extra:
        out.append(f"not part of a {spec.family.model_type} model: {_some(extra)}")
    found = {n: folder.entries[n].shape for n in wanted if n in folder.entries}
    return out + _misshapen({n: (shape, wanted[n]) for n, shape in found.items() if shape != wanted[n]})


def _misshapen(wrong: dict[str, tuple[Shape, Shape]]) -> list[str]:
    """Args: name -> (shape found, shape wanted)."""
    out, told = [], set()
    for name, (found, wanted) in wrong.items():
        if name in told:
            continue
        layer = _layer_of(name)
        others = (n for n, shapes in wrong.items() if shapes == (wanted, found) and _layer_of(n) == layer and n != name)
        other = next(others, None)
        if other is not None:
            told.add(other)
            out.append(f"{name} {list(found)} and {other} {list(wanted)} are swapped, or both transposed")
        else:
            how = " (transposed)" if found == wanted[::-1] else ""
            out.append(f"{name} has shape {list(found)}{how}, expected {list(wanted)}")
    return out


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match.group() if match else ""


def vocabulary_problems(path: Path, spec: ModelSpec) -> list[str]:
    """A tokenizer that knows more tokens than the embedding has rows is of another model."""
    if not (path / "tokenizer.json").is_file():
        return []
    size = read_tokenizer(path)["size"]
    if size <= spec.vocab:
        return []
    return [f"tokenizer.json has ids up to {size - 1}, the embedding has {spec.vocab} rows"]


def check_folder(path: Path, expected: ModelSpec | None = None) -> ModelSpec | None:
    """Raise DataError unless the folder is a complete model; returns its spec, or None for an unknown family.

    Args:
        expected: what the registry says it must be.
    """
    folder = open_weights(path)
    config = folder.config()
    if expected is not None and (differing := expected.check(config)):
        raise DataError(
            f"{path / 'config.json'} is not {expected.name}: {'; '.join(differing)}",
            "name the right model, or give the folder by path without a name",
        )
    try:
        spec = spec_of(folder)
    except SlimeError as error:
        console.warn(f"{path}: {error.what}; the model is used through transformers, unchecked and not convertible")
        return None
    problems = [*weight_problems(folder, spec), *vocabulary_problems(path, spec)]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        fix = "download the model again, or use the matching config and tokenizer"
        raise DataError(f"{path}: {'; '.join(problems[:8])}{more}", fix)
    return spec


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
