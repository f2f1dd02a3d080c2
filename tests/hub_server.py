"""A hub on loopback that speaks the real one's HTTP, with faults on demand.

Reading: repo info with siblings, tree, refs, resolve (HEAD and GET, Range, redirect to a second address).
Further endpoints are entries of `FakeHub.routes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LFS_BYTES = 10_000
"""files from this size on are stated with a SHA-256, as the hub does for LFS"""


def git_blob(data: bytes) -> str:
    """The id that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """One repository: commits, and names for some of them."""

    name: str
    kind: str = "model"
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, contents: dict[str, bytes], branch: str = "main") -> str:
        """A new commit with exactly these files, at the end of a branch; returns its id."""
        listed = "".join(f"{n}\0{git_blob(d)}\n" for n, d in sorted(contents.items()))
        sha = hashlib.sha1(f"{len(self.commits)}\n{listed}".encode()).hexdigest()
        self.commits[sha] = dict(contents)
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """The commit that a branch, tag, or commit id means."""
        names = {**self.branches, **self.tags, **{c: c for c in self.commits}}
        return names.get(revision)


@dataclass
class Seen:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Answer:
    """What goes back."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(data: Any, status: int = 200) -> Answer:
        """A JSON answer."""
        return Answer(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    @staticmethod
    def error(status: int, code: str = "", message: str = "") -> Answer:
        """A refusal with the header by which the hub library tells refusals apart."""
        headers = {"X-Error-Code": code} if code else {}
        return Answer(status, b'{"error": "refused"}', {**headers, "X-Error-Message": message or code})


Handler = Callable[["FakeHub", Seen, re.Match[str]], Answer]


@dataclass
class FakeHub:
    """State of the server; tests change it between calls."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    """(kind, name) -> repository"""
    seen: list[Seen] = field(default_factory=list)
    token: str = ""
    """if set: gated and private repositories open with it, and any other token is refused"""
    redirect: bool = False
    """resolve points to another path for large files, as the hub points to its content servers"""
    ranges: bool = True
    """False: Range is ignored, the whole file comes"""
    cut: dict[str, int] = field(default_factory=dict)
    """file name -> the connection is closed after this many bytes of a body; stays until it is removed"""
    damage: dict[str, int] = field(default_factory=dict)
    """file name -> in so many further answers one byte is wrong"""
    busy: dict[str, list[int]] = field(default_factory=dict)
    """file name -> statuses to answer first, one per request"""
    slow: dict[str, float] = field(default_factory=dict)
    """file name -> seconds of silence in the middle of the next body"""
    api_status: int = 200
    """another: every API call answers with it"""
    routes: list[tuple[str, str, Handler]] = field(default_factory=list)
    """(method, pattern of the whole path, handler), tried in order; put further endpoints in front"""

    def add(self, name: str, contents: dict[str, bytes] | Path, kind: str = "model", **how: Any) -> Repo:
        """A repository with one commit on main."""
        if isinstance(contents, Path):
            found = [p for p in sorted(contents.rglob("*")) if p.is_file()]
            contents = {p.relative_to(contents).as_posix(): p.read_bytes() for p in found}
        repo = self.repos[kind, name] = Repo(name, kind, **how)
        repo.commit(contents)
        return repo

    def bodies(self, name: str) -> list[Seen]:
        """GET requests for one file's content since the start."""
        return [s for s in self.seen if s.method == "GET" and s.path.endswith(f"/{name}")]

    def answer(self, seen: Seen) -> Answer:
        """Dispatch one request."""
        self.seen.append(seen)
        if self.api_status != 200 and seen.path.startswith("/api/"):
            return Answer.error(self.api_status)
        given = seen.headers.get("authorization", "")
        if self.token and given and given != f"Bearer {self.token}":
            return Answer.error(401, message="Invalid credentials in Authorization header")
        for method, pattern, handler in self.routes:
            match = re.fullmatch(pattern, seen.path)
            if match and (method == seen.method or (method == "GET" and seen.method == "HEAD")):
                return handler(self, seen, match)
        return Answer.error(404, message=f"no endpoint {seen.method} {seen.path}")

    def may_read(self, repo: Repo, seen: Seen) -> bool:
        """The request carries the token that opens the repository."""
        return bool(self.token) and seen.headers.get("authorization") == f"Bearer {self.token}"


def _repo(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Repo | Answer:
    """The repository, where it may be known to the caller."""
    kind = (match["kind"] or "models").rstrip("s/")
    repo = hub.repos.get((kind, match["name"]))
    if repo is None or (repo.private and not hub.may_read(repo, seen)):
        return Answer.error(404 if "authorization" in seen.headers else 401, "RepoNotFound")
    return repo


def _info(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
    repo = _repo(hub, seen, match)
    if isinstance(repo, Answer):
        return repo
    commit = repo.find(unquote(match["revision"] or "main"))
    if commit is None:
        return Answer.error(404, "RevisionNotFound")
    siblings = [{"rfilename": n} for n in sorted(repo.commits[commit])]
    facts = {"id": repo.name, "modelId": repo.name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
    return Answer.of({**facts, "private": repo.private, "gated": "auto" if repo.gated else False})


def _tree(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
    repo = _repo(hub, seen, match)
    if isinstance(repo, Answer):
        return repo
    commit = repo.find(unquote(match["revision"]))
    if commit is None:
        return Answer.error(404, "RevisionNotFound")
    entries: list[dict[str, Any]] = []
    for name, data in sorted(repo.commits[commit].items()):
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_blob(data)}
        if len(data) >= LFS_BYTES:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        entries.append(entry)
    return Answer.of(entries)


def _refs(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
    repo = _repo(hub, seen, match)
    if isinstance(repo, Answer):
        return repo
    named = {"branches": ("heads", repo.branches), "tags": ("tags", repo.tags)}
    listed = {
        key: [{"name": n, "ref": f"refs/{part}/{n}", "targetCommit": c} for n, c in refs.items()]
        for key, (part, refs) in named.items()
    }
    return Answer.of({**listed, "converts": []})


def _resolve(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
    repo = _repo(hub, seen, match)
    if isinstance(repo, Answer):
        return repo
    if repo.gated and not hub.may_read(repo, seen):
        return Answer.error(403 if "authorization" in seen.headers else 401, "GatedRepo", "accept the licence")
    commit = repo.find(unquote(match["revision"]))
    if commit is None:
        return Answer.error(404, "RevisionNotFound")
    name = unquote(match["path"])
    data = repo.commits[commit].get(name)
    if data is None:
        return Answer.error(404, "EntryNotFound")
    statuses = hub.busy.get(name)
    if statuses and seen.method == "GET":
        return Answer(statuses.pop(0), b"", {"Retry-After": "0"})
    large = len(data) >= LFS_BYTES
    tag = hashlib.sha256(data).hexdigest() if large else git_blob(data)
    headers = {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
    if large:
        headers |= {"X-Linked-ETag": f'"{tag}"', "X-Linked-Size": str(len(data))}
        if hub.redirect:
            return Answer(302, b"", {**headers, "Location": f"{hub.url}/content{seen.path}"})
    return _content(hub, seen, name, data, headers)


def _redirected(hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
    repo = hub.repos[(match["kind"] or "models").rstrip("s/"), match["name"]]
    name = unquote(match["path"])
    return _content(hub, seen, name, repo.commits[match["revision"]][name], {"Accept-Ranges": "bytes"})


def _content(hub: FakeHub, seen: Seen, name: str, data: bytes, headers: dict[str, str]) -> Answer:
    if seen.method == "GET" and hub.damage.get(name, 0) > 0:
        hub.damage[name] -= 1
        data = bytes([data[0] ^ 1]) + data[1:]
    asked = re.fullmatch(r"bytes=(\d+)-", seen.headers.get("range", ""))
    if asked and hub.ranges:
        start = int(asked[1])
        if start >= len(data):
            return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return Answer(206, data[start:], {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})
    return Answer(200, data, headers)


REPO = r"(?P<kind>datasets/|)(?P<name>[^/]+/[^/]+)"
API = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
READING: list[tuple[str, str, Handler]] = [
    ("GET", rf"{API}/tree/(?P<revision>[^/]+)", _tree),
    ("GET", rf"{API}/refs", _refs),
    ("GET", rf"{API}(?:/revision/(?P<revision>[^/]+))?", _info),
    ("GET", rf"/content/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _redirected),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _resolve),
]


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        answer = self.hub.answer(Seen(self.command, path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        name = unquote(path).rsplit("/", 1)[-1]
        data = answer.body
        if name in self.hub.slow:
            half = len(data) // 2
            self.wfile.write(data[:half])
            self.wfile.flush()
            time.sleep(self.hub.slow.pop(name))
            data = data[half:]
        if name in self.hub.cut and answer.status in (200, 206):
            data = data[: self.hub.cut[name]]
            self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve


@contextlib.contextmanager
def running_hub(*further: tuple[str, str, Handler]) -> Iterator[FakeHub]:
    """A hub on a free port of loopback.

    Args:
        further: endpoints besides those for reading, as in FakeHub.routes.
    """
    hub = FakeHub(routes=[*further, *READING])
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Connection", (_Connection,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
