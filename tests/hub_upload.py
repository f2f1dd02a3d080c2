"""The endpoints of a hub through which repositories are made and files arrive; for tests/hub_server.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from tests.hub_server import API, LFS_BYTES, Answer, FakeHub, Handler, Repo, Seen


@dataclass
class Uploads:
    """What has arrived, and what is allowed."""

    user: str = "me"
    may_write: tuple[str, ...] = ("me",)
    """owners to whose names the token may write"""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content of large files"""
    lost: set[str] = field(default_factory=set)
    """names that a commit forgets"""
    fail_commits: int = 0
    """status that commits are answered with; 0: they work"""

    def routes(self) -> list[tuple[str, str, Handler]]:
        """For running_hub."""
        name = r"(?P<name>[^/]+/[^/]+)"
        return [
            ("GET", "/api/whoami-v2", self._whoami),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", lambda hub, seen, match: Answer.of({"errors": [], "warnings": []})),
            ("POST", rf"{API}/preupload/main", self._modes),
            ("POST", rf"/{name}\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", self._put),
            ("POST", rf"{API}/commit/main", self._commit),
        ]

    def _refused(self, hub: FakeHub, seen: Seen, name: str) -> Answer | None:
        if not hub.token or seen.headers.get("authorization") != f"Bearer {hub.token}":
            return Answer.error(401, message="Invalid username or password.")
        return None if name.split("/")[0] in self.may_write else Answer.error(403, message="no rights")

    def _whoami(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        return self._refused(hub, seen, self.user) or Answer.of({"type": "user", "name": self.user})

    def _create(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        asked = json.loads(seen.body)
        name = f"{asked['organization']}/{asked['name']}"
        if refused := self._refused(hub, seen, name):
            return refused
        is_new = ("model", name) not in hub.repos
        if is_new:
            hub.repos["model", name] = Repo(name, private=asked.get("visibility") == "private")
            hub.repos["model", name].commit({})
        return Answer.of({"url": f"{hub.url}/{name}"}, 200 if is_new else 409)

    def _modes(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        files = json.loads(seen.body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_BYTES else "regular", "shouldIgnore": False}
            for f in files
        ]
        return self._refused(hub, seen, match["name"]) or Answer.of({"files": modes})

    def _batch(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        objects: list[dict[str, Any]] = []
        for one in json.loads(seen.body)["objects"]:
            upload = {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.blobs else {"actions": upload})})
        return self._refused(hub, seen, match["name"]) or Answer.of({"transfer": "basic", "objects": objects})

    def _put(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        if hashlib.sha256(seen.body).hexdigest() != match["oid"]:
            return Answer.error(400, message="not what was announced")
        self.blobs[match["oid"]] = seen.body
        return Answer()

    def _commit(self, hub: FakeHub, seen: Seen, match: re.Match[str]) -> Answer:
        if refused := self._refused(hub, seen, match["name"]):
            return refused
        if self.fail_commits:
            return Answer.error(self.fail_commits)
        repo = hub.repos["model", match["name"]]
        contents = dict(repo.commits[repo.branches["main"]])
        for line in seen.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                contents[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                contents[value["path"]] = self.blobs[value["oid"]]
        oid = repo.commit({n: d for n, d in contents.items() if n not in self.lost})
        return Answer.of({"commitUrl": f"{hub.url}/{repo.name}/commit/{oid}", "commitOid": oid})
