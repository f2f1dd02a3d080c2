"""What a hub repository holds, which of it is wanted, and where it lies on this machine."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from slimecli import files
from slimecli.errors import DataError

Kind = Literal["model", "dataset"]

MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")
"""what a model needs; pickled weights and code are left on the hub"""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
CODE = ("*.py",)
INDEX_FILE = "model.safetensors.index.json"
SECOND_COPY = ("consolidated*.safetensors",)
"""the same weights once more under other names, beside a folder's `model*.safetensors`"""
HIDDEN = (".cache", ".git")
"""folders of tools, no part of a repository"""
HELD = "held.json"
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """One file as the hub states it."""

    path: str
    """relative, with forward slashes"""
    size: int
    """bytes"""
    blob: str = ""
    """git blob id: SHA-1 of a header and the content; empty for a large file"""
    sha256: str = ""
    """of the content; large files (LFS) only"""

    @property
    def etag(self) -> str:
        """The name of its content in the shared cache."""
        return self.sha256 or self.blob

    def damage(self, path: Path, deep: bool = True) -> str:
        """What is wrong with the copy at `path`; empty: nothing. Contents are hashed with `deep` only."""
        if not path.is_file():
            return "missing"
        size = path.stat().st_size
        if size != self.size:
            return f"{size} bytes, the hub states {self.size}"
        if not deep or not self.etag:
            return ""
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
        kind = "sha256" if self.sha256 else "git blob"
        found = digest.hexdigest()
        return "" if found == self.etag else f"{kind} {found[:12]}..., the hub states {self.etag[:12]}..."


@dataclass(frozen=True)
class Listing:
    """All files of a repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]

    def save(self, path: Path) -> None:
        """Keep it, so that later calls know what belongs together without asking."""
        files.write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Listing | None:
        """The stored listing; None if there is none."""
        if not path.is_file():
            return None
        data: dict[str, Any] = files.read_json(path)
        return Listing(data["repo"], data["commit"], tuple(HubFile(**f) for f in data["files"]))


@dataclass(frozen=True)
class Choice:
    """Which files are fetched, and which are not and why."""

    wanted: tuple[HubFile, ...]
    left: dict[str, list[str]]
    """reason ("pickled", "code", "copy", "ignored", "other") -> names"""

    @property
    def is_partial(self) -> bool:
        """Something that the model is made of was left out on request."""
        return any(n == "config.json" or n.endswith(".safetensors") for n in self.left.get("ignored", []))


def refuse_unsafe(names: Iterable[str], repo: str) -> None:
    """A name that would land outside its folder means that the repository is not to be trusted at all."""
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
            raise DataError(
                f"{repo} lists a file {name!r}, which would be written outside its folder",
                "do not use this repository; nothing was fetched",
            )


def choose(listed: Sequence[HubFile], kind: Kind, allow: Sequence[str], ignore: Sequence[str]) -> Choice:
    """Sort files into wanted and left; `allow` replaces the default selection, `ignore` takes away from either."""
    wanted: list[HubFile] = []
    left: dict[str, list[str]] = {}
    top = {f.path for f in listed}
    has_copy = any(fnmatch.fnmatch(n, "model*.safetensors") for n in top)
    for file in listed:
        name, base = file.path, PurePosixPath(file.path).name
        reason = ""
        if allow:
            reason = "" if _matches(name, allow) else "other"
        elif kind == "dataset":
            pickled = _matches(base, PICKLED) and not base.endswith(".bin")  # .bin is a usual name of token files
            reason = "code" if _matches(base, CODE) else "pickled" if pickled else ""
        elif _matches(base, CODE):
            reason = "code"
        elif _matches(base, PICKLED):
            reason = "pickled"
        elif has_copy and _matches(name, SECOND_COPY):
            reason = "copy"
        elif "/" in name or not _matches(name, MODEL_FILES):
            reason = "other"
        if not reason and _matches(name, ignore):
            reason = "ignored"
        if reason:
            left.setdefault(reason, []).append(name)
        else:
            wanted.append(file)
    return Choice(tuple(wanted), left)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def scan(folder: Path) -> tuple[HubFile, ...]:
    """The files that lie in a folder. In a hub cache, the name of what a link points to is its content's hash."""
    out = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name.split("/")[0] in HIDDEN:
            continue
        blob = path.resolve().name if path.is_symlink() else ""
        kind = {40: "blob", 64: "sha256"}.get(len(blob) if re.fullmatch("[0-9a-f]+", blob) else 0)
        out.append(HubFile(name, path.stat().st_size, **({kind: blob} if kind else {})))
    return tuple(out)


@dataclass(frozen=True)
class Store:
    """Where one repository lies: in the shared cache (laid out as all hub libraries do) or in a plain folder."""

    root: Path
    flat: bool
    """a plain folder: files lie under their own names, for one commit at a time"""

    @staticmethod
    def in_cache(cache: Path, repo: str, kind: Kind) -> Store:
        """Its place in a hub cache."""
        return Store(cache / f"{kind}s--{repo.replace('/', '--')}", flat=False)

    def folder(self, commit: str) -> Path:
        """Where the files of a commit are found under their names."""
        return self.root if self.flat else self.root / "snapshots" / commit

    def data(self, file: HubFile) -> Path:
        """Where the bytes go."""
        return self.root / file.path if self.flat else self.root / "blobs" / file.etag

    def partial(self, file: HubFile) -> Path:
        """Where the bytes are collected until they are complete; the same for each call, so that it can go on."""
        folder = self._notes if self.flat else self.root / "blobs"
        return folder / f"{file.etag}.slime.incomplete"

    @property
    def _notes(self) -> Path:
        return self.root / ".cache" / "slime" if self.flat else self.root / "slime"

    def listing_path(self, commit: str) -> Path:
        """What the hub stated for this commit."""
        return self._notes / f"{commit}.json"

    def ref_path(self, revision: str) -> Path:
        """Holds the commit that a branch or tag meant when it was last asked for."""
        return (self._notes if self.flat else self.root) / "refs" / revision

    def commit_of(self, revision: str) -> str:
        """The commit of a revision, as far as this machine knows; empty: not at all."""
        if COMMIT.fullmatch(revision):
            return revision
        path = self.ref_path(revision)
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def listing(self, repo: str, commit: str) -> Listing | None:
        """What belongs to a commit: as stored, or in a cache that another program filled, what lies there."""
        known = Listing.load(self.listing_path(commit))
        if known is None and not self.flat and self.folder(commit).is_dir():
            return Listing(repo, commit, scan(self.folder(commit)))
        return known

    def held(self) -> dict[str, str]:
        """name -> content id of files that were hashed and found right; only a plain folder needs it."""
        path = self._notes / HELD
        return files.read_json(path) if self.flat and path.is_file() else {}

    def hold(self, wanted: Sequence[HubFile]) -> None:
        """Note that these files are what the hub states."""
        if self.flat:
            files.write_json(self._notes / HELD, {**self.held(), **{f.path: f.etag for f in wanted}})

    def faulty(self, wanted: Sequence[HubFile], commit: str, deep: bool) -> list[tuple[HubFile, str]]:
        """Files that are not there as stated, with what is wrong.

        In a plain folder a file of the right size may be of another commit: what was not hashed before is hashed now.
        """
        held = self.held()

        def damage(file: HubFile) -> str:
            unknown = self.flat and held.get(file.path) != file.etag
            return file.damage(self.find(file, commit), deep or unknown)

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing leaves the interpreter lock free
            return [(f, wrong) for f, wrong in zip(wanted, pool.map(damage, wanted), strict=True) if wrong]

    def find(self, file: HubFile, commit: str) -> Path:
        """Where the bytes are now, or would be."""
        named = self.folder(commit) / file.path
        return named if named.is_file() else self.data(file)

    def publish(self, file: HubFile, commit: str) -> None:
        """Make the bytes appear under their name."""
        data, named = self.data(file), self.folder(commit) / file.path
        if self.flat or (named.is_file() and (not data.is_file() or named.samefile(data))):
            return
        named.parent.mkdir(parents=True, exist_ok=True)
        temporary = named.with_name(f".{named.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(os.path.relpath(data, named.parent))
        except OSError:  # a file system without links
            shutil.copyfile(data, temporary)
        temporary.replace(named)
