"""A folder of weight versions: now and then all weights, else the changes since the version before (disk_delta).

chain.json lists them: {"format": 1, "links": [{"version", "kind": "full" or "changes", "folder", "fingerprint",
"base_version", "base_fingerprint", "bytes"}]}. Who holds a version that is in the chain applies the changes after it;
who does not (a new engine, or one that was restarted) takes the last whole version first. What is held is known by its
fingerprint. Nothing here need outlast a power cut: a trainer that starts anew makes a chain anew.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.sync import delta
from slimecli.weights.fingerprint import Fingerprint
from slimecli.weights.hf import HfFolder, save_hf_folder, tensor_bytes

FORMAT = 1
NAME = "chain.json"
ROOM = 1.0
"""changes since the last whole version that take this share of it make a new one"""
MOST = 64
"""so many changes in a row make one as well: a new engine has to apply them all"""
WHOLE = "whole"
"""folder, beside the versions, in which all weights of one version are kept for servers that cannot apply changes"""
Pairs = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One version, whole or as changes."""

    version: int
    kind: str
    folder: str
    fingerprint: str
    base_version: int = -1
    """changes: the version that they are from, and its fingerprint"""
    base_fingerprint: str = ""
    bytes: int = 0


class Chain:
    """The versions of one run."""

    def __init__(self, folder: Path, links: list[Link]) -> None:
        self.folder = folder
        self.links = links

    @classmethod
    def read(cls, folder: Path) -> Chain:
        """The chain of a folder; an error if there is none."""
        try:
            told = files.read_json(folder / NAME)
            links = [Link(**link) for link in told["links"]]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise SlimeError(f"{folder} holds no chain of weights: {error!r}", "stage the weights again") from None
        return cls(folder, links)

    def write(self) -> None:
        """Make this the folder's chain."""
        told = {"format": FORMAT, "links": [asdict(link) for link in self.links]}
        files.write_json(self.folder / NAME, told, durable=False)

    def of(self, version: int, kind: str) -> Link | None:
        """The link of a version."""
        return next((link for link in self.links if (link.version, link.kind) == (version, kind)), None)

    def path(self, held: str, version: int) -> list[Link]:
        """What to apply to weights with the fingerprint `held` to get a version; [] if these are it."""
        back: list[Link] = []
        whole: list[Link] | None = None
        at = version
        while True:
            changes, full = self.of(at, "changes"), self.of(at, "full")
            here = changes or full
            if here is not None and here.fingerprint == held:
                return back[::-1]
            if full is not None and whole is None:
                whole = [full, *back[::-1]]
            if changes is None or changes.base_version >= at:
                break
            back.append(changes)
            if changes.base_fingerprint == held:
                return back[::-1]
            at = changes.base_version
        if whole is None:
            raise SlimeError(f"{self.folder} does not lead to version {version}", "stage the weights again")
        return whole

    def at(self, link: Link) -> Path:
        """The folder of a link."""
        return self.folder / link.folder


@dataclass
class _Snapshot:
    """What was staged last, on the CPU."""

    fingerprint: str
    version: int
    tensors: dict[str, torch.Tensor]


_snapshots: dict[str, _Snapshot] = {}
"""per run, in the trainer's process"""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A version that was added to a chain."""

    mark: Fingerprint
    bytes: int
    """of all weights"""
    written: int
    """to the disk (bytes)"""
    changed: float
    """fraction of the elements that changed"""


def stage(pairs: Pairs, *, version: int, folder: Path, like: Path) -> Staged:
    """Add a version to the chain of a folder: changes if an earlier version was staged by this process, else all.

    All weights are written besides the changes once those since the last whole version are many, or take as much room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _snapshots.pop(str(folder), None)
    # a version that is staged once more, for engines that were all lost, begins a chain: one has one link to a version
    if before is None or version <= before.version:
        shutil.rmtree(folder)
        folder.mkdir()
        chain = Chain(folder, [])
        fresh: dict[str, torch.Tensor] = {}
        mark, link = _stage_whole(_kept(pairs, fresh), version, folder, like)
        chain.links.append(link)
        staged = Staged(mark=mark, bytes=link.bytes, written=link.bytes, changed=1.0)
    else:
        chain, fresh = Chain.read(folder), before.tensors
        mark, told = _stage_changes(pairs, before, version, folder)
        chain.links.append(_changes_link(told))
        total = sum(t.nbytes for t in fresh.values())
        fraction = told["changed"] / max(told["elements"], 1)
        staged = Staged(mark=mark, bytes=total, written=told["bytes"], changed=fraction)
        if _is_long(chain, total):
            chain.links.append(_stage_whole(fresh.items(), version, folder, like)[1])
            staged = replace(staged, written=staged.written + total)
    chain.write()
    _prune(chain)
    _snapshots[str(folder)] = _Snapshot(mark.hexdigest(), version, fresh)
    return staged


def forget(folder: Path) -> None:
    """Drop the snapshot of a run: the next version is staged whole."""
    _snapshots.pop(str(folder), None)


def _kept(pairs: Pairs, into: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        into[name] = tensor.detach().to("cpu", copy=True).contiguous()
        yield name, into[name]


def _marked(pairs: Pairs, mark: Fingerprint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        mark.update(name, tensor.detach())
        yield name, tensor


def _stage_whole(pairs: Pairs, version: int, folder: Path, like: Path) -> tuple[Fingerprint, Link]:
    name, mark, notes = f"v{version:06d}", Fingerprint(), {"version": version}
    with files.committed_folder(folder / name, notes, durable=False) as temporary:
        notes |= save_hf_folder(pairs, temporary, like=like, mark=mark)
    link = Link(version=version, kind="full", folder=name, fingerprint=mark.hexdigest(), bytes=notes["bytes"])
    return mark, link


def _stage_changes(pairs: Pairs, before: _Snapshot, version: int, folder: Path) -> tuple[Fingerprint, dict[str, Any]]:
    """Write the changes, and bring the snapshot up to them."""
    mark, seen = Fingerprint(), set()
    about: dict[str, Any] = {
        "version": version, "base_version": before.version, "base_fingerprint": before.fingerprint
    }  # fmt: skip

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _marked(pairs, mark):
            seen.add(name)
            if name not in before.tensors or before.tensors[name].shape != tensor.shape:
                raise SlimeError(f"{name} was not among the weights of version {before.version}", "start the run again")
            yield name, tensor
            before.tensors[name].copy_(tensor.detach())  # its changes are written by now
        if lost := set(before.tensors) - seen:
            raise SlimeError(f"{min(lost)} is no longer among the weights", "start the run again")
        about["fingerprint"] = mark.hexdigest()

    with files.committed_folder(folder / f"d{version:06d}", {"version": version}, durable=False) as temporary:
        told = delta.write(watched(), before.tensors, temporary, about, lambda name, _: mark.digest(name))
    return mark, told


def _changes_link(told: dict[str, Any]) -> Link:
    names = ("version", "fingerprint", "base_version", "base_fingerprint", "bytes")
    return Link(kind="changes", folder=f"d{told['version']:06d}", **{name: told[name] for name in names})


def _is_long(chain: Chain, total: int) -> bool:
    """Whether a new engine would have too much to apply."""
    whole = max(link.version for link in chain.links if link.kind == "full")
    since = [link.bytes for link in chain.links if link.kind == "changes" and link.version > whole]
    return sum(since) >= ROOM * total or len(since) >= MOST


def _prune(chain: Chain) -> None:
    """Remove what nobody needs: all before the last whole version, but for the changes to it."""
    whole = max(link.version for link in chain.links if link.kind == "full")
    gone = [link for link in chain.links if link.version < whole]
    chain.links = [link for link in chain.links if link.version >= whole]
    if gone:
        chain.write()
    for link in gone:
        shutil.rmtree(chain.at(link), ignore_errors=True)


def materialise(folder: Path, version: int) -> Path:
    """A version of a chain as an ordinary HF folder, for servers that cannot apply changes.

    It is kept beside the versions and brought forward in place, by one caller at a time. Every tensor is verified
    before it is written.
    """
    Chain.read(folder)  # who names another folder hears of it
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return _materialise(folder, version)


def _materialise(folder: Path, version: int) -> Path:
    chain, out = Chain.read(folder), folder / WHOLE
    state = out / "STATE.json"
    held = str(files.read_json(state).get("fingerprint", "")) if state.is_file() else ""
    for link in chain.path(held, version):
        if link.kind == "full":
            shutil.rmtree(out, ignore_errors=True)
            with files.explain_disk_errors(out):
                shutil.copytree(chain.at(link), out, ignore=shutil.ignore_patterns(files.DONE))
        else:
            changes = delta.Delta(chain.at(link))
            changes.check_base(held)
            _write_changes(changes, out, state)
        held = link.fingerprint
        files.write_json(state, {"version": link.version, "fingerprint": link.fingerprint}, durable=False)
    return out


def _write_changes(changes: delta.Delta, out: Path, state: Path) -> None:
    stored = HfFolder(out)
    for name in changes.tensors:
        changes.applied(name, stored.read(name))
    state.unlink()  # from here on the folder is of no version until it is whole again
    for name in changes.tensors:
        entry = stored.entries[name]
        new = changes.applied(name, stored.read(name))
        with files.explain_disk_errors(entry.file), entry.file.open("r+b") as handle:
            handle.seek(entry.offset)
            handle.write(tensor_bytes(new))
