"""What a conversion would do, from the spec or from headers alone: nothing is written, no weight is read."""

from __future__ import annotations

import math
from typing import Any

import torch

from slimecli.model_specs import ModelSpec
from slimecli.weights.conversion import default_jobs, kinds_of
from slimecli.weights.convert import SHARD_BYTES
from slimecli.weights.hf_write import HfPlan
from slimecli.weights.maps import objects_of
from slimecli.weights.maps.rule import Rule
from slimecli.weights.pieces import PIECE, Source
from slimecli.weights.quant_codec import E4M3
from slimecli.weights.quant_fp8 import quantizer_of
from slimecli.weights.quantized import SCALE, scale_shape
from slimecli.weights.torch_dist_write import TorchDistPlan

DISK = 1e9
"""bytes per second that the estimate of time assumes, for reading and for writing"""
BASE_MEMORY = 300_000_000
"""bytes of the process itself: Python, torch, the map"""


def preview(
    spec: ModelSpec,
    to: str,
    rules: list[Rule],
    *,
    source: Source | None = None,
    dtype: torch.dtype | None = None,
    quantize: str = "",
    verify: bool = True,
) -> dict[str, Any]:
    """The mapping table, the files, and what it would take.

    Args:
        rules: the map.
        source: what would be converted; None: the model as the spec has it, in bfloat16 unless `dtype` is given.
        quantize: name in quant_fp8.QUANTIZERS; empty: no.
    """
    quantizer = quantizer_of(quantize)
    dtype = dtype or (torch.bfloat16 if quantizer else None)
    published = {n: torch.float32 if rule.keep_dtype else torch.bfloat16 for rule in rules for n in rule.hf}
    stored = published if source is None else {name: source.dtype(name) for name in published}
    if source is None:
        kinds = {n: dtype if dtype and kind == torch.bfloat16 else kind for n, kind in published.items()}
    else:
        kinds = kinds_of(source, rules, dtype)
    shapes = {name: shape for rule in rules for name, shape in rule.hf.items()}
    tensors = {}
    for name, shape in shapes.items():
        taken = quantizer is not None and quantizer.takes(name, shape)
        tensors[name] = (E4M3 if taken else kinds[name], shape)
        if taken:
            tensors[name + SCALE] = (torch.float32, scale_shape(shape))
    if to == "torch_dist":
        files = TorchDistPlan(rules, kinds, objects_of(rules), "release").packer.files
    else:
        files = HfPlan(tensors, SHARD_BYTES).packer.files
    written = sum(size for _, size in files)
    read = sum(math.prod(shape) * stored[name].itemsize for name, shape in shapes.items())
    threads = default_jobs()
    return {
        "model": spec.name,
        "to": to,
        "bytes": sum(math.prod(shape) * kind.itemsize for kind, shape in tensors.values()),
        "bytes_written": written,
        "files": [{"name": name, "bytes": size} for name, size in files],
        "jobs": threads,
        "memory_bytes": BASE_MEMORY + threads * 2 * PIECE,
        "seconds_at_1_gb_per_s": round((max(read, written) + (written if verify else 0)) / DISK, 1),
        "tensors": [_row(rule, {name: tensors[name][0] for name in rule.hf}) for rule in rules],
    }


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
