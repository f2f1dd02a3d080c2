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
from slimecli.sync import shared_memory
from slimecli.weights.fingerprint import Fingerprint
from slimecli.weights.hf import save_hf_folder

Pairs = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class StagedWeights:
    """Weights that wait for engines, with what a receipt must say."""

    update: WeightUpdate
    fingerprint: str
    bytes_: int
    seconds: float


def stage_weights(
    pairs: Pairs, kind: SyncKind, *, version: int, folder: Path, like: Path, one_host: bool = False
) -> StagedWeights:
    """Stage one version.

    Args:
        pairs: the trainer's weights(); iterated to its end on every rank.
        version: step whose weights these are.
        folder: disk: the HF folder to commit; shared_memory: tells the buffers of several runs in one process apart.
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
    if kind == "disk":
        notes: dict[str, Any] = {"version": version}
        with files.committed_folder(folder, notes) as temporary:
            notes |= save_hf_folder(pairs, temporary, like=like)
        update = WeightUpdate(kind=kind, version=version, folder=folder)
        return StagedWeights(update=update, fingerprint=notes["fingerprint"], bytes_=notes["bytes"], seconds=0.0)
    if kind == "shared_memory":
        manifest, total = shared_memory.write(_marked(pairs, mark), version=version, key=str(folder))
        update = WeightUpdate(kind=kind, version=version, manifest=manifest)
        return StagedWeights(update=update, fingerprint=mark.hexdigest(), bytes_=total, seconds=0.0)
    tensors = dict(_marked(pairs, mark))
    total = sum(t.nbytes for t in tensors.values())
    if kind == "distributed":
        from slimecli.sync.distributed import offer

        update = WeightUpdate(kind=kind, version=version, group=offer(tensors, version, one_host=one_host))
    else:
        update = WeightUpdate(kind=kind, version=version, tensors=tensors)
    return StagedWeights(update=update, fingerprint=mark.hexdigest(), bytes_=total, seconds=0.0)


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
