"""The trainer's half of a weight sync: put the weights where engines can take them, and say what they are.

Collective: every rank iterates the weights, rank 0 keeps them, all ranks return the same fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.protocols import SyncKind, WeightUpdate
from slimecli.sync import buckets, shared_memory
from slimecli.weights.fingerprint import Fingerprint
from slimecli.weights.hf import save_hf_folder

Pairs = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class StagedWeights:
    """Weights that wait for engines, with what a receipt must say."""

    update: WeightUpdate
    fingerprint: str
    digests: dict[str, str]
    """per tensor, to name the one that an engine holds otherwise"""
    bytes_: int
    """of all weights"""
    seconds: float
    written: int = -1
    """bytes that were laid down for engines, where that is not all"""
    changed: float = 1.0
    """disk_delta: fraction of the elements that changed since the version before"""


def stage_weights(
    pairs: Pairs, kind: SyncKind, *, version: int, folder: Path, like: Path, one_host: bool = False
) -> StagedWeights:
    """Stage one version.

    Args:
        pairs: the trainer's weights(); iterated to its end on every rank.
        version: step whose weights these are.
        folder: disk: the HF folder to commit; disk_delta: the folder of the chain; shared_memory and tensor: tells the
            buffers of several runs in one process apart.
        like: HF folder with config and tokenizer.
        one_host: distributed: no engine is on another machine.
    """
    begin = time.perf_counter()
    staged: StagedWeights | SlimeError | None = None
    if _rank() == 0:
        try:
            staged = _stage(pairs, kind, version, folder, like, one_host=one_host)
        except SlimeError as error:
            staged = error
    for _ in pairs:
        pass  # the other ranks take part in the gathering; rank 0 is at the end already unless it failed
    if _world() > 1:
        staged = _same_everywhere(staged)
    if isinstance(staged, SlimeError):
        raise staged
    assert staged is not None
    return replace(staged, seconds=time.perf_counter() - begin)


def _stage(pairs: Pairs, kind: SyncKind, version: int, folder: Path, like: Path, *, one_host: bool) -> StagedWeights:
    mark = Fingerprint()
    update = WeightUpdate(kind=kind, version=version)
    if kind == "disk_delta":
        return _stage_chain(pairs, update, folder, like)
    if kind == "disk":
        notes: dict[str, Any] = {"version": version}
        with files.committed_folder(folder, notes) as temporary:
            notes |= save_hf_folder(pairs, temporary, like=like, mark=mark)
        return _staged(replace(update, folder=folder), mark, notes["bytes"])
    if kind == "shared_memory":
        manifest, total = shared_memory.write(_marked(pairs, mark), version=version, key=str(folder))
        return _staged(replace(update, manifest=manifest), mark, total)
    if kind == "tensor":
        made, there, total = buckets.stage(_marked(pairs, mark), version=version, key=str(folder))
        return _staged(replace(update, buckets=made, manifest=there), mark, total)
    tensors = dict(_marked(pairs, mark))
    total = sum(t.nbytes for t in tensors.values())
    if kind == "distributed":
        from slimecli.sync.distributed import offer

        return _staged(replace(update, group=offer(tensors, version, one_host=one_host)), mark, total)
    return _staged(replace(update, tensors=tensors), mark, total)


def _stage_chain(pairs: Pairs, update: WeightUpdate, folder: Path, like: Path) -> StagedWeights:
    from slimecli.sync import chain

    staged = chain.stage(pairs, version=update.version, folder=folder, like=like)
    done = _staged(replace(update, folder=folder), staged.mark, staged.bytes)
    return replace(done, written=staged.written, changed=staged.changed)


def _staged(update: WeightUpdate, mark: Fingerprint, total: int) -> StagedWeights:
    return StagedWeights(update=update, fingerprint=mark.hexdigest(), digests=mark.digests(), bytes_=total, seconds=0.0)


def _marked(pairs: Pairs, mark: Fingerprint) -> Pairs:
    """The same pairs, fingerprinted as they pass."""
    for name, tensor in pairs:
        tensor = tensor.detach()
        mark.update(name, tensor)
        yield name, tensor


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _same_everywhere(staged: StagedWeights | SlimeError | None) -> StagedWeights | SlimeError | None:
    """Rank 0's outcome on all ranks, tensors left out; also holds them until rank 0 has committed."""
    told: Any = staged
    if isinstance(staged, StagedWeights) and staged.update.tensors is not None:
        told = replace(staged, update=replace(staged.update, tensors={}))
    box = [told]
    torch.distributed.broadcast_object_list(box, src=0)
    return staged if _rank() == 0 else box[0]
