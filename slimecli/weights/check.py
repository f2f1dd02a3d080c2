"""Is this HF folder the model it says it is? Answered from headers and config alone."""

from __future__ import annotations

import re
from pathlib import Path

from slimecli import console
from slimecli.errors import DataError, SlimeError
from slimecli.model_specs import ModelSpec, from_config
from slimecli.weights.maps import hf_shapes
from slimecli.weights.quant import Weights, open_weights

_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
"""buffers that old checkpoints carry and every loader computes anew"""


def spec_of(folder: Weights) -> ModelSpec:
    """The spec that the folder's config describes."""
    return from_config(folder.config(), name=folder.path.name)


def extra_names(folder: Weights, spec: ModelSpec) -> list[str]:
    """Tensors that may stand in a folder of this model besides its weights."""
    also = {"lm_head.weight"} if spec.tied else set()
    return [n for n in folder.names if n in also or _HARMLESS.search(n)]


def weight_problems(folder: Weights, spec: ModelSpec) -> list[str]:
    """Missing, extra and misshapen tensors; a transposed one is called by its name."""
    wanted = hf_shapes(spec)
    ignored = set(extra_names(folder, spec))
    missing = [n for n in wanted if n not in folder.entries]
    extra = [n for n in folder.names if n not in wanted and n not in ignored]
    out = [f"missing {_some(missing)}"] if missing else []
    out += [f"not part of a {spec.family.model_type} model: {_some(extra)}"] if extra else []
    for name, shape in wanted.items():
        found = folder.entries[name].shape if name in folder.entries else shape
        if found != shape:
            how = " (transposed)" if found == shape[::-1] else ""
            out.append(f"{name} has shape {list(found)}{how}, expected {list(shape)}")
    return out


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
    problems = weight_problems(folder, spec)
    if problems:
        raise DataError(f"{path}: {'; '.join(problems[:8])}", "download the model again, or use the matching config")
    return spec


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
