"""Weights from a chain of versions (sync.chain), for the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slimecli.engines.embedded.weights import FolderWeights, Incoming, WeightBook, WeightsRefused
from slimecli.errors import SlimeError
from slimecli.sync.chain import Chain, Link
from slimecli.sync.delta import Delta
from slimecli.weights.fingerprint import tensor_digest


@dataclass(frozen=True)
class Checked:
    """A folder of changes that come out right on the weights with this fingerprint."""

    folder: Path
    held: str


def check_ahead(book: WeightBook, folder: Path, version: str | None, held: str) -> Checked | None:
    """What an update will have to check, while requests still run: the first changes on its path.

    Reads live weights, which nobody changes but an update; should one come in between, `apply` finds another
    fingerprint and checks again.
    """
    path = _path(folder, version, held)
    if not path or path[0].kind == "full":
        return None
    _check(book, _opened(folder / path[0].folder))
    return Checked(folder / path[0].folder, held)


def steps(book: WeightBook, folder: Path, version: str | None, checked: Checked | None) -> Iterator[Incoming]:
    """What leads from the weights that are held to a version of the chain, each to be loaded before the next is asked.

    A step that is refused leaves the engine at the version before it, whole.
    """
    path = _path(folder, version, held_by(book))
    if not path:
        yield Incoming(headers=[], tensors=[], whole=False, how="none")
    for link in path:
        yield _step(book, folder, link, checked)


def _path(folder: Path, version: str | None, held: str) -> list[Link]:
    if version is None or not version.isdigit():
        raise WeightsRefused(f"weight_version {version!r} is no number", "name a version of the chain")
    try:
        return Chain.read(folder).path(held, int(version))
    except SlimeError as error:
        raise WeightsRefused(error.what, error.fix) from None


def held_by(book: WeightBook) -> str:
    """Fingerprint of the weights that are held; empty if they are not whole."""
    return "" if book.trouble else book.held or book.fingerprint()


def _step(book: WeightBook, folder: Path, link: Link, checked: Checked | None) -> Incoming:
    where, name = folder / link.folder, str(link.version)
    if link.kind == "full":
        stored = FolderWeights(where)
        tensors = stored.tensors()
        return Incoming(headers=stored.headers, tensors=tensors, version=name, wanted=link.fingerprint)
    return apply(book, where, name, checked)


def apply(book: WeightBook, where: Path, version: str, checked: Checked | None = None) -> Incoming:
    """The changes of one folder, verified: the chain, and every tensor that would come out."""
    held = held_by(book)
    changes = _opened(where, held)
    if checked != Checked(where, held):
        _check(book, changes)
    headers = [(n, tuple(e["shape"]), str(e["dtype"])) for n, e in changes.tensors.items()]
    return Incoming(
        headers=headers, tensors=_new(book, changes), whole=False, how="changes", version=version,
        wanted=changes.fingerprint, bytes_=int(changes.told["bytes"]),
    )  # fmt: skip


def _opened(where: Path, held: str | None = None) -> Delta:
    """The changes of a folder, and if `held` is told, only such as are from these weights."""
    try:
        changes = Delta(where)
        if held is not None:
            changes.check_base(held)
    except SlimeError as error:
        raise WeightsRefused(error.what, error.fix) from None
    return changes


def _check(book: WeightBook, changes: Delta) -> None:
    """Refuse changes of which one tensor does not come out as it was sent."""
    try:
        for name in changes.tensors:
            changes.applied(name, book.value(name))
    except KeyError as error:
        raise WeightsRefused(f"the changes name {error}, which this model lacks", "push all weights") from None
    except SlimeError as error:
        raise WeightsRefused(error.what, error.fix) from None


def _new(book: WeightBook, changes: Delta) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in changes.tensors.items():
        old = book.value(name)
        # of two names of one tied weight the second finds the change in place
        is_there = book.is_alias(name) and tensor_digest(name, old) == entry["digest"]
        yield name, old if is_there else changes.new(name, old)
