"""Prediction layers (MTP) that are not trained: they go from the model's folder into checkpoints and to engines as they
are. What some repositories store again beside them, embedding and output layer, is the policy's of now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slimecli.model_specs import ModelSpec
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import copies_of, objects_of, rules_of
from slimecli.weights.maps.rule import Rule

PREFIX = "mtp."
"""of their Megatron names"""


def untrained(folder: HfFolder, spec: ModelSpec, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor in `dtype`) of every weight of the prediction layers, as the folder has it."""
    for rule in _rules(folder, spec):
        for name in rule.hf:
            tensor = folder.read(name)
            yield name, tensor if rule.keep_dtype else tensor.to(dtype)


def with_copies(pairs: Iterator[tuple[str, Tensor]], folder: HfFolder, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The pairs, each followed by what the folder's prediction layers have again of it, under their names."""
    again = copies_of(spec, folder.entries)
    for name, tensor in pairs:
        yield name, tensor
        for copy in again.get(name, ()):
            yield copy, tensor


def in_checkpoint(folder: HfFolder, spec: ModelSpec) -> dict[str, Any]:
    """Megatron name -> megatron-core's description of the whole tensor, on one rank, for a checkpoint of a model
    without prediction layers; nothing but them is read."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rules = _rules(folder, spec)
    whole: dict[str, Tensor] = {}
    for rule in rules:
        chunk = rule.merge([folder.read(name) for name in rule.hf]).reshape(rule.chunk)
        full = whole.setdefault(rule.key, chunk.new_empty(rule.full))
        full[tuple(slice(a, a + n) for a, n in zip(rule.offset, rule.chunk, strict=True))] = chunk
    out: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in whole.items()}
    for name in objects_of(rules):
        key, _, shard = name.rpartition("/shard_")
        number, count = (int(part) for part in shard.split("_"))
        out[name] = ShardedObject(key, None, (count,), (number,))
    return out


def _rules(folder: HfFolder, spec: ModelSpec) -> list[Rule]:
    stored = {name: entry.shape for name, entry in folder.entries.items()}
    return [rule for rule in rules_of(spec, 0, stored) if rule.key.startswith(PREFIX)]
