"""What a conversion would do, from the spec or from headers alone: nothing is written, no weight is read."""

from __future__ import annotations

import math
from typing import Any

import torch

from slimecli.model_specs import ModelSpec
from slimecli.weights.conversion import default_jobs
from slimecli.weights.convert import SHARD_BYTES
from slimecli.weights.hf_write import HfPlan
from slimecli.weights.maps import objects_of, rules_of
from slimecli.weights.maps.rule import Rule
from slimecli.weights.pieces import PIECE
from slimecli.weights.quant import Weights
from slimecli.weights.torch_dist_write import TorchDistPlan

DISK = 1e9
"""bytes per second that the estimate of time assumes, for reading and for writing"""
BASE_MEMORY = 300_000_000
"""bytes of the process itself: Python, torch, the map"""


def preview(
    spec: ModelSpec,
    to: str,
    *,
    folder: Weights | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    jobs: int = 0,
) -> dict[str, Any]:
    """The mapping table, the files, and what it would take.

    Args:
        folder: HF folder to convert; None: the model as the spec has it, in bfloat16 unless `dtype` is given.
    """
    padded = spec.padded_vocab() if to == "torch_dist" else 0
    rules = rules_of(spec, padded, folder.shapes if folder is not None else None)
    kinds = {name: _kind(name, rule, folder, dtype) for rule in rules for name in rule.hf}
    if to == "torch_dist":
        files = TorchDistPlan(rules, kinds, objects_of(rules), "release").packer.files
    else:
        shapes = {name: shape for rule in rules for name, shape in rule.hf.items()}
        files = HfPlan({n: (kinds[n], shape) for n, shape in shapes.items()}, SHARD_BYTES).packer.files
    written = sum(size for _, size in files)
    read = folder.nbytes if folder is not None else written
    threads = jobs or default_jobs()
    return {
        "model": spec.name,
        "to": to,
        "bytes": sum(math.prod(s) * kinds[n].itemsize for rule in rules for n, s in rule.hf.items()),
        "bytes_written": written,
        "files": [{"name": name, "bytes": size} for name, size in files],
        "jobs": threads,
        "memory_bytes": BASE_MEMORY + threads * 2 * PIECE,
        "seconds_at_1_gb_per_s": round((max(read, written) + (written if verify else 0)) / DISK, 1),
        "tensors": [_row(rule, kinds) for rule in rules],
    }


def _kind(name: str, rule: Rule, folder: Weights | None, dtype: torch.dtype | None) -> torch.dtype:
    if rule.keep_dtype or dtype is None:
        unknown = torch.float32 if rule.keep_dtype else torch.bfloat16
        return folder.entries[name].dtype if folder is not None else unknown
    return dtype


def _row(rule: Rule, kinds: dict[str, torch.dtype]) -> dict[str, Any]:
    return {
        "hf": ", ".join(rule.hf),
        "megatron": rule.key,
        "offset": list(rule.offset),
        "shape": list(rule.chunk),
        "global": list(rule.full),
        "dtype": str(kinds[next(iter(rule.hf))]).removeprefix("torch."),
        "bytes": sum(math.prod(shape) * kinds[name].itemsize for name, shape in rule.hf.items()),
    }
