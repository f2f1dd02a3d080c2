"""slime download against a server that speaks the hub's endpoints; a process of its own, as offline mode is global."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slimecli.cli import run
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.models import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One model, me/tiny; me/gated is gated."""

    folder = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if "me/gated" in path:
            self._answer(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif "me/tiny" not in path:
            self._answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="no repo")
        elif not ("/main" in path or COMMIT in path or path.endswith("me/tiny")):
            self._answer(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="no revision")
        elif path.startswith("/api/models/me/tiny/tree/"):
            files = [
                {
                    "type": "file",
                    "path": p.name,
                    "size": p.stat().st_size,
                    "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
                }
                for p in sorted(self.folder.iterdir())
            ]
            self._answer(200, json.dumps(files).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/me/tiny"):
            names = [{"rfilename": p.name} for p in sorted(self.folder.iterdir())]
            body = {
                "id": "me/tiny",
                "modelId": "me/tiny",
                "sha": COMMIT,
                "siblings": names,
                "private": False,
                "tags": [],
            }
            self._answer(200, json.dumps(body).encode(), Content_Type="application/json")
        else:
            file = self.folder / path.rsplit("/", 1)[1]
            if not file.is_file():
                self._answer(404, b"", X_Error_Code="EntryNotFound")
                return
            data = file.read_bytes()
            tag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, ETag=f'"{tag}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    Hub.folder = tiny_model(tmp_path_factory.mktemp("hub") / "model")
    (Hub.folder / "pytorch_model.bin").write_bytes(b"pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def slime(hub, tmp_path, *args):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1"}
    code = "from slimecli.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "download", *args], env=environment, capture_output=True, text=True, timeout=90
    )


def test_model_arrives_checked_and_is_found_offline(hub, tmp_path):
    done = slime(hub, tmp_path, "me/tiny", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    folder = HfFolder(data["folder"])
    assert data["checked"] and data["model"] == "qwen3"
    assert fingerprint(folder.iterate()) == fingerprint(HfFolder(Hub.folder).iterate())
    assert not (folder.path / "pytorch_model.bin").exists()
    again = slime("http://127.0.0.1:9", tmp_path, "me/tiny", "--offline", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["folder"] == data["folder"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["me/gated"], "is gated"),
        (["me/absent"], "no such repository"),
        (["me/tiny", "--revision", "nope"], "no such revision"),
        (["me/tiny", "--offline"], "not completely in the cache"),
    ],
)
def test_failures_say_what_to_do(args, said, hub, tmp_path):
    done = slime(hub, tmp_path, *args)
    assert done.returncode == 1 and said in done.stderr and "fix:" in done.stderr, done.stderr


def test_a_silent_hub_is_named(tmp_path):
    done = slime("http://127.0.0.1:9", tmp_path, "me/tiny")
    assert done.returncode == 1 and "http://127.0.0.1:9" in done.stderr and "fix:" in done.stderr, done.stderr


def test_folder_source_and_copy(tmp_path, capsys):
    model = tiny_model(tmp_path / "m")
    assert run(["download", f"file://{model}", "--out", str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"] is True
    assert fingerprint(HfFolder(tmp_path / "copy").iterate()) == fingerprint(HfFolder(model).iterate())
    assert run(["download", "file:///nowhere"]) == 4
    assert run(["download", "quickstart"]) == 2


def test_full_disk_is_refused_before_the_first_byte(tmp_path, monkeypatch, capsys):
    from slimecli.weights import hub as module

    model = tiny_model(tmp_path / "m")
    monkeypatch.setattr(module, "SPARE_BYTES", 10**18)
    assert run(["download", f"file://{model}", "--out", str(tmp_path / "copy")]) == 1
    assert "GB" in capsys.readouterr().err and not (tmp_path / "copy").exists()
