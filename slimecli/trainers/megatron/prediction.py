"""Prediction layers (MTP): their loss where they are trained (heads.py). Where they are not, they go from the model's
folder into checkpoints and to engines as they are. What some repositories store again beside them, embedding and output
layer, is the policy's of now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimecli.batch import TrainBatch
from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec
from slimecli.trainers._loss import Tally
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import copies_of, objects_of, rules_of
from slimecli.weights.maps.rule import Rule
from slimecli.weights.torch_dist import TorchDist

PREFIX = "mtp."
"""of their Megatron names"""


def weighted_loss(ahead: list[Tensor], batch: TrainBatch, tally: Tally, *, counts: bool) -> Tensor:
    """[] the mean over layers of a micro-batch's cross entropy, to be added to that of all others; `tally` takes it.

    Args:
        ahead: of each layer [T] log-probs with gradient, 0 where not trained.
        counts: False for a micro-batch that only keeps collectives in step.
    """
    surprise = -torch.stack(ahead).mean(0)
    mask, weight = (x.to(surprise.device) * float(counts) for x in (batch.loss_mask, batch.loss_weight))
    tally.add({"mtp_loss": (surprise.detach() * mask).sum()}, {})
    return (surprise * weight).sum()


def check_resume(folder: Path, *, trains: bool) -> None:
    """Raise if a checkpoint's prediction layers were trained and are not to be now, or the other way."""
    trained = any(key.startswith("optimizer.") and f".{PREFIX}" in key for key in TorchDist(folder).entries)
    if trained != trains:
        was, now = ("trained", "off") if trained else ("not trained", "on")
        raise DataError(
            f"{folder}: its prediction layers were {was}, and [megatron] mtp_loss_scaling_factor has it {now}",
            "resume as it was saved, or `slime convert` it and start a run from that",
        )


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
