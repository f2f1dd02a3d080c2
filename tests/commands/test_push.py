"""slime export --push against a server that speaks the hub's endpoints."""

import json
import os
import subprocess
import sys

import pytest

from slimecli import files
from slimecli.cli import run
from slimecli.commands.export import export_folder
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from slimecli.weights.partial import JOURNAL
from tests.hub_server import running_hub
from tests.hub_upload import Uploads
from tests.models import tiny_model

TOKEN = "hf_secret"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("push")
    return export_folder(tiny_model(root / "model"), root / "exported")


@pytest.fixture
def uploads():
    return Uploads()


@pytest.fixture
def hub(uploads, monkeypatch, tmp_path):
    """A running hub that this process may talk to, though tests are offline."""
    from huggingface_hub import constants

    with running_hub(*uploads.routes()) as server:
        server.token = TOKEN
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def arrived(hub, name):
    repo = hub.repos["model", name]
    return repo.commits[repo.branches["main"]]


def test_everything_arrives_as_it_is_here(exported, hub, capsys):
    (exported / JOURNAL).write_text("[]\n")  # as a kill in the last instant of an export leaves it
    assert run(["export", "--from", str(exported), "--push", "me/tiny", "--private", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    contents = arrived(hub, "me/tiny")
    here = {str(p.relative_to(exported)) for p in exported.rglob("*") if p.is_file()}
    assert set(contents) == here - {files.DONE, JOURNAL}
    assert all(contents[n] == (exported / n).read_bytes() for n in contents)
    repo = hub.repos["model", "me/tiny"]
    assert repo.private and told["pushed"]["commit"] == repo.branches["main"]
    assert told["pushed"]["url"] == f"{hub.url}/me/tiny" and told["folder"] == str(exported)
    assert {s.headers.get("authorization") for s in hub.seen if s.path.startswith("/api/")} == {f"Bearer {TOKEN}"}


def test_pushing_again_sends_nothing_large_again(exported, hub, uploads):
    for _ in range(2):
        assert run(["export", "--from", str(exported), "--push", "me/tiny"]) == 0
    assert not hub.repos["model", "me/tiny"].private
    assert len([s for s in hub.seen if s.method == "PUT"]) == len(uploads.blobs) > 0


def test_export_and_push_in_one_go_and_load_what_came(hub, tmp_path):
    """A process of its own, as a user has it; what the hub then holds is the model."""
    model = tiny_model(tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    words = ["export", "--from", str(model), "--out", str(tmp_path / "o"), "--push", "me/tiny"]
    code = "from slimecli.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "pushing to me/tiny as me" in done.stderr
    back = tmp_path / "back"
    for name, data in arrived(hub, "me/tiny").items():
        (back / name).parent.mkdir(parents=True, exist_ok=True)
        (back / name).write_bytes(data)
    assert fingerprint(HfFolder(back).iterate()) == fingerprint(HfFolder(model).iterate())
    assert "base_model" not in (back / "README.md").read_text()


def refusals(exported, capsys, repo="me/tiny"):
    code = run(["export", "--from", str(exported), "--push", repo])
    said = capsys.readouterr().err
    assert code != 0 and "fix:" in said
    return code, said


def test_without_a_token(exported, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    code, said = refusals(exported, capsys)
    assert code == 1 and "no token" in said and "hf auth login" in said and not hub.seen


def test_with_a_wrong_token(exported, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    _, said = refusals(exported, capsys)
    assert "does not accept your token" in said


def test_without_rights(exported, hub, capsys):
    _, said = refusals(exported, capsys, "someone/tiny")
    assert "may not write to someone/tiny" in said and ("model", "someone/tiny") not in hub.repos


def test_offline_and_unreachable(exported, hub, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    _, said = refusals(exported, capsys)
    assert "cannot reach http://127.0.0.1:9" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, said = refusals(exported, capsys)
    assert "offline mode is on" in said


@pytest.mark.parametrize("name", ["tiny", "me/", "/tiny", "a/b/c", "me/ti ny"])
def test_names_that_are_none(name, exported, hub, capsys):
    code, said = refusals(exported, capsys, name)
    assert code == 2 and "is no repository" in said and not hub.repos


def test_access_is_asked_before_the_work(hub, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    model = tiny_model(tmp_path / "model")
    assert run(["export", "--from", str(model), "--out", str(tmp_path / "o"), "--push", "me/tiny"]) == 1
    assert not (tmp_path / "o").exists()


def test_a_failed_push_keeps_the_export_and_says_how_to_go_on(hub, uploads, tmp_path, capsys):
    uploads.fail_commits = 500
    model, out = tiny_model(tmp_path / "model"), tmp_path / "o"
    assert run(["export", "--from", str(model), "--out", str(out), "--push", "me/tiny"]) == 1
    said = capsys.readouterr().err
    assert f"slime export --from {out} --push me/tiny" in said and files.is_committed(out)
    uploads.fail_commits = 0
    assert run(["export", "--from", str(out), "--push", "me/tiny"]) == 0
    assert "model.safetensors" in arrived(hub, "me/tiny")


def test_a_hub_that_loses_a_file_is_caught(exported, hub, uploads, capsys):
    uploads.lost = {"tokenizer.json"}
    _, said = refusals(exported, capsys)
    assert "has not taken over tokenizer.json" in said


def test_flags_that_do_not_fit(exported, capsys):
    assert run(["export", "--from", str(exported), "--private"]) == 2
    assert "--push" in capsys.readouterr().err
