"""Weights from a chain of versions (sync.chain), for the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from slimecli.engines.embedded.weights import FolderWeights, Incoming, WeightBook, WeightsRefused
from slimecli.errors import SlimeError
from slimecli.sync.chain import Chain, Link
from slimecli.sync.delta import Delta
from slimecli.weights.fingerprint import tensor_digest


def steps(book: WeightBook, folder: Path, version: str | None) -> Iterator[Incoming]:
    """What leads from the weights that are held to a version of the chain, each to be loaded before the next is asked.

    A step that is refused leaves the engine at the version before it, whole.
    """
    if version is None or not version.isdigit():
        raise WeightsRefused(f"weight_version {version!r} is no number", "name a version of the chain")
    try:
        path = Chain.read(folder).path(held_by(book), int(version))
    except SlimeError as error:
        raise WeightsRefused(error.what, error.fix) from None
    if not path:
        yield Incoming(headers=[], tensors=[], whole=False, how="none")
    for link in path:
        yield _step(book, folder, link)


def held_by(book: WeightBook) -> str:
    """Fingerprint of the weights that are held; empty if they are not whole."""
    return "" if book.trouble else book.held or book.fingerprint()


def _step(book: WeightBook, folder: Path, link: Link) -> Incoming:
    where, name = folder / link.folder, str(link.version)
    if link.kind == "full":
        stored = FolderWeights(where)
        tensors = stored.tensors()
        return Incoming(headers=stored.headers, tensors=tensors, version=name, wanted=link.fingerprint)
    return apply(book, where, name)


def apply(book: WeightBook, where: Path, version: str) -> Incoming:
    """The changes of one folder, verified: the chain, and every tensor that would come out."""
    try:
        changes = Delta(where)
        changes.check_base(held_by(book))
        for name in changes.tensors:
            changes.applied(name, book.value(name))
    except KeyError as error:
        raise WeightsRefused(f"the changes name {error}, which this model lacks", "push all weights") from None
    except SlimeError as error:
        raise WeightsRefused(error.what, error.fix) from None
    headers = [(n, tuple(e["shape"]), str(e["dtype"])) for n, e in changes.tensors.items()]
    return Incoming(
        headers=headers, tensors=_new(book, changes), whole=False, how="changes", version=version,
        wanted=changes.fingerprint, bytes_=int(changes.told["bytes"]),
    )  # fmt: skip


def _new(book: WeightBook, changes: Delta) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in changes.tensors.items():
        old = book.value(name)
        # of two names of one tied weight the second finds the change in place
        is_there = book.is_alias(name) and tensor_digest(name, old) == entry["digest"]
        yield name, old if is_there else changes.applied(name, old)
