"""Models and data sets from the hub, a mirror of it (HF_ENDPOINT), or a `file://` folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from slimecli import console, env, files
from slimecli.errors import DataError, InterruptedRunError, SlimeError, UsageError
from slimecli.weights import hub_errors, transfer
from slimecli.weights.listing import COMMIT, Choice, HubFile, Kind, Listing, Store, choose, refuse_unsafe, scan

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SPARE_BYTES = 256 << 20
"""disk space that must remain free after a download (bytes)"""
MAIN = "main"


@dataclass(frozen=True)
class Fetched:
    """What lies on this machine now."""

    folder: Path
    repo: str
    revision: str
    """as asked for"""
    commit: str
    """what the revision means; empty for a plain folder"""
    source: str
    """hub, cache (nothing was asked of the hub, or it was silent) or folder"""
    files: dict[str, int]
    """name -> bytes"""
    fetched_bytes: int = 0
    """over the network, in this call"""
    left: dict[str, list[str]] = field(default_factory=dict)
    """reason -> names of files that were not fetched"""
    is_partial: bool = False
    """`ignore` left out something that the model is made of"""


@dataclass(frozen=True)
class Access:
    """How fetch comes by files."""

    endpoint: str = ""
    """address of the hub or a mirror, `file://` for a local one; empty: HF_ENDPOINT"""
    offline: bool = False
    """use only what is in the cache"""
    verify: bool = False
    """hash files that were there before, too; else their sizes must be right"""


@dataclass(frozen=True)
class Request:
    """One call of fetch."""

    repo: str
    revision: str
    kind: Kind
    out: Path | None
    allow: tuple[str, ...]
    ignore: tuple[str, ...]
    place: str
    """address of the hub"""
    verify: bool

    @property
    def at(self) -> str:
        """How messages call it."""
        return f"{self.repo}@{self.revision}" if self.revision != MAIN else self.repo

    @property
    def cached(self) -> Store:
        """Its place in the shared cache."""
        return Store.in_cache(env.hf_cache(), self.repo, self.kind)

    @property
    def store(self) -> Store:
        """Where the files go."""
        return Store(self.out.absolute(), flat=True) if self.out else self.cached

    def choice(self, listed: Sequence[HubFile]) -> Choice:
        """What of a repository is wanted; raises DataError where that cannot be the thing asked for."""
        refuse_unsafe((f.path for f in listed), self.repo)
        choice = choose(listed, self.kind, self.allow, self.ignore)
        weights = any(f.path.endswith(".safetensors") for f in choice.wanted) or choice.is_partial
        if self.kind == "model" and not self.allow and not weights:
            also = f": {', '.join(choice.left['pickled'][:3])}" if "pickled" in choice.left else ""
            raise DataError(
                f"{self.at} has no safetensors weights" + (f", only pickled ones{also}" if also else ""),
                "slime loads no pickle: use a repository with *.safetensors; --dataset if it is a data set; "
                "--allow GLOB fetches files anyway",
            )
        if not choice.wanted:
            names = ", ".join(f.path for f in listed[:5])
            raise DataError(f"{self.at} has none of the files wanted; it has {names or 'none at all'}", "see --allow")
        return choice


def fetch(
    repo: str,
    *,
    revision: str = "",
    kind: Kind = "model",
    out: Path | None = None,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    access: Access = Access(),
) -> Fetched:
    """Bring a repository's files to this machine.

    What arrives is compared with what the hub states (size and SHA); a partial file of an earlier call is continued.

    Args:
        repo: `owner/name`, or a `file://` folder.
        revision: branch, tag or commit; empty: main.
        out: copy into this folder; None: the shared hub cache.
        allow: glob patterns of wanted files; empty: MODEL_FILES for a model; all but code and pickles for a data set.
        ignore: glob patterns of unwanted files.
        access: which hub, if any, and how far what is there already is trusted.
    """
    place = (access.endpoint or env.hf_endpoint()).rstrip("/")
    if not place.startswith(("http://", "https://", "file:///")):
        raise UsageError(f"{place!r} is not the address of a hub", "write https://HOST or file:///DIR")
    asked = Request(repo, revision or MAIN, kind, out, tuple(allow), tuple(ignore), place, access.verify)
    folder, commit = _local_source(asked)
    if folder is not None:
        return _from_folder(folder, commit, asked)
    hub_errors.check_name(repo)
    with files.explain_disk_errors(out or env.hf_cache()):
        if access.offline or env.hf_offline():
            return _offline(asked, "offline mode is on")
        return _online(asked)


def _online(asked: Request) -> Fetched:
    """From the hub; where it is silent and the cache is complete, from there, with a warning."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=asked.place, token=env.hf_token())
    try:
        listing = _ask(api, asked)
    except (*hub_errors.network_errors(), transfer.transport_error()) as error:
        if not hub_errors.is_silence(error):
            raise hub_errors.explain(error, api, asked) from error
        reason = hub_errors.reason(error)
        try:
            kept = _offline(asked, reason)
        except SlimeError:
            raise hub_errors.silent(asked, reason) from error
        console.warn(f"{asked.place} does not answer ({reason}): {asked.at} as in the cache, commit {kept.commit}")
        return kept
    choice = asked.choice(listing.files)
    store = asked.store
    _refuse_foreign(store, choice.wanted, asked)
    listing.save(store.listing_path(listing.commit))
    if not COMMIT.fullmatch(asked.revision):
        files.write_text(store.ref_path(asked.revision), listing.commit)
    todo = store.faulty(choice.wanted, listing.commit, asked.verify)
    for file, wrong in todo:
        if wrong != "missing":
            console.warn(f"{file.path}: {wrong}; fetched again")
    received = _bring(api, asked, [f for f, _ in todo], listing.commit)
    for file in choice.wanted:
        store.publish(file, listing.commit)
    store.hold(choice.wanted)
    return _result(asked, listing.commit, "hub", choice, received)


def _ask(api: HfApi, asked: Request) -> Listing:
    """What the hub states about the revision; a commit never changes, so what is known of it is not asked again."""
    from huggingface_hub.hf_api import RepoFile

    repo, kind, commit = asked.repo, asked.kind, asked.revision
    if not COMMIT.fullmatch(commit):
        commit = str(api.repo_info(repo, repo_type=kind, revision=asked.revision, timeout=transfer.SILENCE).sha)
    known = Listing.load(asked.store.listing_path(commit)) or Listing.load(asked.cached.listing_path(commit))
    if known is not None:
        return known
    tree = api.list_repo_tree(repo, recursive=True, revision=commit, repo_type=kind)
    listed = [
        HubFile(f.path, f.lfs.size, sha256=f.lfs.sha256) if f.lfs else HubFile(f.path, f.size, f.blob_id)
        for f in tree
        if isinstance(f, RepoFile)
    ]
    return Listing(repo, commit, tuple(listed))


def _bring(api: HfApi, asked: Request, todo: list[HubFile], commit: str) -> int:
    """Fetch what is not there; returns the bytes received."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    store = asked.store
    unique = {store.data(f): f for f in todo}  # a repository may hold one content under two names
    jobs = [
        transfer.Job(
            f,
            hf_hub_url(asked.repo, f.path, repo_type=asked.kind, revision=commit, endpoint=asked.place),
            store.data(f),
            store.partial(f),
        )
        for f in unique.values()
    ]
    if asked.out:
        jobs = [j for j in jobs if not _take_from_cache(asked, j, commit)]
    need_space(sum(j.missing for j in jobs), asked.out or env.hf_cache(), asked.at)
    huge = [j for j in jobs if j.file.size > constants.MAX_HTTP_DOWNLOAD_SIZE]
    if jobs:
        start = sum(j.file.size - j.missing for j in jobs)
        so_far = f", {start / 1e9:.3f} GB of it there already" if start else ""
        size = sum(j.file.size for j in jobs) / 1e9
        console.note(f"{asked.at}: commit {commit}, {len(jobs)} files, {size:.3f} GB{so_far}")
    try:
        for job in huge:
            _bring_huge(asked, job, commit)
        received = transfer.bring([j for j in jobs if j not in huge], build_hf_headers(token=env.hf_token()))
    except KeyboardInterrupt:
        left = sum(j.missing for j in jobs if not j.target.is_file())
        raise InterruptedRunError(
            f"{asked.at} was stopped with {left / 1e9:.3f} GB to come", "call the same again: it goes on from there"
        ) from None
    except (*hub_errors.network_errors(), transfer.transport_error()) as error:
        raise hub_errors.explain(error, api, asked) from error
    return received + sum(j.file.size for j in huge)


def _bring_huge(asked: Request, job: transfer.Job, commit: str) -> None:
    """The hub serves files above its limit through its own protocol only, which starts anew when interrupted."""
    from huggingface_hub import hf_hub_download

    where: dict[str, Any] = {"local_dir": asked.out} if asked.out else {"cache_dir": env.hf_cache()}
    address: dict[str, Any] = {
        "repo_type": asked.kind,
        "revision": commit,
        "endpoint": asked.place,
        "token": env.hf_token(),
    }
    hf_hub_download(asked.repo, job.file.path, force_download=True, **address, **where)
    if wrong := job.file.damage(job.target):
        raise DataError(f"{asked.at}: {job.file.path} arrived damaged: {wrong}", "try again, or another HF_ENDPOINT")


def _take_from_cache(asked: Request, job: transfer.Job, commit: str) -> bool:
    """Copy to `out` what the shared cache has; False: it has not."""
    held = asked.cached.find(job.file, commit)
    if job.file.damage(held):
        return False
    need_space(job.file.size, job.target, asked.at)
    copy_file(held, job.target)
    return True


def _refuse_foreign(store: Store, wanted: Sequence[HubFile], asked: Request) -> None:
    """A folder that no download made must not lose a file to one."""
    if not store.flat or any((store.root / ".cache" / n).is_dir() for n in ("slime", "huggingface")):
        return
    other = [f.path for f in wanted if (store.root / f.path).exists() and f.damage(store.root / f.path)]
    if other:
        raise UsageError(
            f"{store.root} has another {', '.join(other[:3])}, which {asked.at} would overwrite",
            "name an empty folder with --out",
        )


def _offline(asked: Request, why: str) -> Fetched:
    """From the cache alone; raises SlimeError that names what is not there."""
    for store in dict.fromkeys((asked.store, asked.cached)):
        commit = store.commit_of(asked.revision)
        listing = store.listing(asked.repo, commit) if commit else None
        if listing is None:
            continue
        choice = asked.choice(listing.files)
        faulty = store.faulty(choice.wanted, commit, asked.verify)
        if not faulty and store != asked.store:
            return _from_folder(store.folder(commit), commit, asked)
        if not faulty:
            for file in choice.wanted:
                store.publish(file, commit)
            return _result(asked, commit, "cache", choice)
        if store == asked.cached:
            names = "; ".join(f"{f.path} ({wrong})" for f, wrong in faulty[:5])
            more = f" and {len(faulty) - 5} more" if len(faulty) > 5 else ""
            raise hub_errors.not_cached(f"{asked.at} is not completely in the cache: {names}{more}; {why}")
    raise hub_errors.not_cached(f"{asked.at} is not completely in the cache {env.hf_cache()}: nothing of it; {why}")


def _result(asked: Request, commit: str, source: str, choice: Choice, received: int = 0) -> Fetched:
    sizes = {f.path: f.size for f in choice.wanted}
    folder = asked.store.folder(commit)
    return Fetched(folder, asked.repo, asked.revision, commit, source, sizes, received, choice.left, choice.is_partial)


def need_space(needed: int, place: Path, at: str) -> None:
    """Refuse what cannot fit, before its first byte."""
    free = shutil.disk_usage(files.existing_parent(place.absolute())).free
    if needed and needed + SPARE_BYTES > free:
        raise SlimeError(
            f"{at} needs {(needed + SPARE_BYTES) / 1e9:.2f} GB with some to spare, {place} has {free / 1e9:.2f} GB",
            "free space, or put the cache elsewhere: HF_HOME=/bigger/disk, or --out DIR",
        )


def copy_file(source: Path, target: Path) -> None:
    """A copy that is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.slime.incomplete")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _local_source(asked: Request) -> tuple[Path | None, str]:
    """(folder, commit) of a `file://` repository, or of a repository in a `file://` mirror; (None, "") for others."""
    if asked.repo.startswith("file://"):
        folder = Path(unquote(urlparse(asked.repo).path))
        if not folder.is_dir():
            raise DataError(f"{asked.repo} is not a folder", "give an absolute path to a folder: file:///DIR")
        if asked.revision != MAIN:
            raise UsageError(f"{asked.repo} is a folder and has no revision {asked.revision!r}", "leave --revision out")
        return folder, ""
    if not asked.place.startswith("file://"):
        return None, ""
    hub_errors.check_name(asked.repo)
    mirror = Path(unquote(urlparse(asked.place).path))
    cache = Store.in_cache(mirror, asked.repo, asked.kind)
    if (commit := cache.commit_of(asked.revision)) and cache.folder(commit).is_dir():
        return cache.folder(commit), commit
    plain = [mirror / asked.repo] if asked.kind == "model" else [mirror / "datasets" / asked.repo, mirror / asked.repo]
    if asked.revision == MAIN and (found := [p for p in plain if p.is_dir()]):
        return found[0], ""
    looked = ", ".join(map(str, [*plain, cache.root]))
    raise SlimeError(
        f"{asked.at} is not in the mirror {asked.place}: looked for {looked}",
        "check the folder; a mirror holds OWNER/NAME folders or is a hub cache, and only that has revisions",
    )


def _from_folder(source: Path, commit: str, asked: Request) -> Fetched:
    """A folder's files: used where they lie, or copied to `out`."""
    listed = scan(source)
    choice = asked.choice(listed)
    wrong = [f"{f.path}: {w}" for f in choice.wanted if asked.verify and (w := f.damage(source / f.path))]
    if wrong:
        raise DataError(f"{source} is damaged: {'; '.join(wrong[:5])}", "copy these files anew")
    if asked.out and asked.out.resolve() != source.resolve():
        store = asked.store
        _refuse_foreign(store, choice.wanted, asked)
        need_space(sum(f.size for f in choice.wanted if f.damage(store.data(f), False)), store.root, asked.at)
        with files.explain_disk_errors(store.root):
            Listing(asked.repo, commit, listed).save(store.listing_path(commit or "folder"))
            if commit:
                files.write_text(store.ref_path(asked.revision), commit)
            for file in choice.wanted:
                copy_file(source / file.path, store.data(file))
    sizes = {f.path: f.size for f in choice.wanted}
    folder = asked.out or source
    return Fetched(folder, asked.repo, asked.revision, commit, "folder", sizes, 0, choice.left, choice.is_partial)
