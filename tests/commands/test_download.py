"""slime download from the command line, against a hub on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimecli import files
from slimecli.cli import run
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.weights.hf import HfFolder
from slimecli.weights.source import materialise_model, resolve_model_dir
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def hub(online, model):
    online.add("me/tiny", model)
    return online


@pytest.fixture
def registered(hub, model, monkeypatch):
    """A registry entry `tiny` whose repository is me/tiny."""
    import dataclasses

    from slimecli.model_specs import from_config, registry

    spec = from_config(files.read_json(model / "config.json"), name="tiny")
    known = {**registry(), "tiny": dataclasses.replace(spec, repo="me/tiny", revision="main")}
    for module in ("slimecli.model_specs", "slimecli.model_specs.registry"):
        monkeypatch.setattr(sys.modules[module], "registry", lambda: known)
    return hub


def download(capsys, *arguments):
    code = run(["download", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else captured.out, captured.err


def same_weights(left, right):
    return all(
        (Path(left) / n).read_bytes() == (Path(right) / n).read_bytes() for n in ("model.safetensors", "config.json")
    )


def test_a_model_arrives_checked(hub, model, capsys):
    code, data, err = download(capsys, "me/tiny")
    assert code == 0 and data["checked"] and data["model"] == "qwen3" and same_weights(data["folder"], model)
    assert data["commit"] == hub.repos["model", "me/tiny"].branches["main"] and data["commit"] in err
    assert data["bytes"] == data["fetched_bytes"] == sum(data["files"].values()) and data["source"] == "hub"
    assert data["files"]["model.safetensors"] == (model / "model.safetensors").stat().st_size
    assert data["left"]["pickled"] == ["pytorch_model.bin"] and data["left"]["code"] == ["modeling_tiny.py"]
    assert "pickled files are not fetched" in err and "--allow '*.py'" in err
    assert not (Path(data["folder"]) / "pytorch_model.bin").exists()
    code, again, _ = download(capsys, "me/tiny", "--offline")
    assert code == 0 and again["folder"] == data["folder"] and again["source"] == "cache" and again["checked"]


def test_for_people_the_folder_is_the_only_line_on_stdout(hub, capsys):
    assert run(["download", "me/tiny"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 and Path(captured.out.strip()).is_dir()
    assert "checked as qwen3" in captured.err and "slime plan" in captured.err
    assert hub.repos["model", "me/tiny"].branches["main"] in captured.err


def test_a_selection_is_not_checked_as_a_model(hub, capsys):
    code, data, _ = download(capsys, "me/tiny", "--allow", "*.py")
    assert code == 0 and list(data["files"]) == ["modeling_tiny.py"] and not data["checked"]
    code, data, _ = download(capsys, "me/tiny", "--ignore", "*.safetensors")
    assert code == 0 and not data["checked"] and "config.json" in data["files"]


def test_a_data_set(hub, capsys):
    hub.add("me/rows", {"data/train.jsonl": b'{"a": 1}\n', "rows.py": b""}, kind="dataset")
    code, data, _ = download(capsys, "me/rows", "--dataset")
    assert code == 0 and list(data["files"]) == ["data/train.jsonl"] and data["model"] is None and not data["checked"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["me/absent"], 1, "no such model"),
        (["me/tiny", "--revision", "nope"], 1, "there are main"),
        (["me/tiny", "--offline"], 1, "not completely in the cache"),
        (["me/tiny", "--endpoint", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer"),
        (["me/tiny", "--endpoint", "file:///nowhere"], 1, "is not in the mirror"),
        (["me/tiny", "--allow", "*.gguf"], 4, "has none of the files wanted"),
        (["a/b/c"], 2, "is not a repository name"),
        (["qwen3-0.6"], 2, "did you mean"),
        (["quickstart"], 2, "no published weights"),
        (["file:///nowhere"], 4, "is not a folder"),
        (["me/gated"], 1, "is gated"),
        (["me/evil"], 4, "outside its folder"),
        (["me/old"], 4, "only pickled ones"),
    ],
)
def test_failures_say_what_to_do(arguments, code, said, hub, capsys):
    hub.add("me/gated", {"config.json": b"{}", "model.safetensors": b""}, gated=True)
    hub.add("me/evil", {"../../.bashrc": b"boo"})
    hub.add("me/old", {"pytorch_model.bin": b""})
    assert run(["download", *arguments]) == code
    captured = capsys.readouterr()
    assert said in captured.err and "fix:" in captured.err and "Traceback" not in captured.err and not captured.out


def test_an_unknown_family_comes_with_a_warning(hub, model, tmp_path, capsys):
    contents = {n: (model / n).read_bytes() for n in ("model.safetensors", "tokenizer.json")}
    config = {**files.read_json(model / "config.json"), "model_type": "brandnew"}
    hub.add("me/new", {**contents, "config.json": json.dumps(config).encode()})
    code, data, err = download(capsys, "me/new")
    assert code == 0 and not data["checked"] and data["model"] is None
    assert "brandnew" in err and "unchecked" in err


def test_a_wrong_tensor_is_named(hub, model, capsys):
    config = {**files.read_json(model / "config.json"), "intermediate_size": 128}
    contents = {n: (model / n).read_bytes() for n in ("model.safetensors", "tokenizer.json")}
    hub.add("me/wrong", {**contents, "config.json": json.dumps(config).encode()})
    assert run(["download", "me/wrong"]) == 4
    assert "model.layers.0.mlp.down_proj.weight" in capsys.readouterr().err


def test_damage_in_the_cache_is_mended(hub, model, capsys):
    _, data, _ = download(capsys, "me/tiny")
    path = Path(data["folder"]) / "model.safetensors"
    content = path.read_bytes()
    path.resolve().write_bytes(content[:-4] + b"\1\2\3\4")
    code, again, err = download(capsys, "me/tiny")
    assert code == 0 and path.read_bytes() == content and "fetched again" in err
    assert again["fetched_bytes"] == len(content)
    path.resolve().write_bytes(content[:-4])
    assert run(["download", "me/tiny", "--offline"]) == 1
    assert f"{len(content) - 4} bytes, the hub states {len(content)}" in capsys.readouterr().err


def test_a_registry_name_goes_the_same_way_everywhere(registered, model, runs_root, capsys):
    code, data, _ = download(capsys, "tiny")
    assert code == 0 and data["model"] == "tiny" and data["repo"] == "me/tiny" and data["revision"] == "main"
    assert str(resolve_model_dir("tiny")) == data["folder"] == str(resolve_model_dir("me/tiny"))
    recipe = load_recipe("", ("model.source='hub'", "model.name='tiny'"))
    taken = materialise_model(recipe, create_run("r", recipe))
    notes = files.read_json(taken / files.DONE)
    assert notes["commit"] == data["commit"] and notes["repo"] == "me/tiny" and same_weights(taken, model)
    assert HfFolder(taken).names == HfFolder(model).names and not (taken / "modeling_tiny.py").exists()
    assert len(registered.bodies("model.safetensors")) == 1


def test_code_comes_with_a_recipe_that_trusts_it(registered, runs_root):
    recipe = load_recipe("", ("model.source='hub'", "model.name='tiny'", "model.trust_remote_code=true"))
    assert (materialise_model(recipe, create_run("r", recipe)) / "modeling_tiny.py").is_file()


def test_a_repository_that_is_not_what_the_registry_says_costs_no_weights(registered, model, capsys):
    config = {**files.read_json(model / "config.json"), "num_hidden_layers": 5}
    registered.repos["model", "me/tiny"].commit(
        {**{p.name: p.read_bytes() for p in model.iterdir()}, "config.json": json.dumps(config).encode()}
    )
    assert run(["download", "tiny"]) == 4
    assert "layers: spec 3, config 5" in capsys.readouterr().err and not registered.bodies("model.safetensors")


def test_folder_source_and_copy(model, tmp_path, capsys):
    code, data, _ = download(capsys, f"file://{model}", "--out", str(tmp_path / "copy"))
    assert code == 0 and data["checked"] and data["source"] == "folder" and data["commit"] == ""
    assert same_weights(tmp_path / "copy", model) and not (tmp_path / "copy" / "pytorch_model.bin").exists()
    code, data, _ = download(capsys, f"file://{model}")
    assert code == 0 and data["folder"] == str(model)


def test_full_disk_is_refused_before_the_first_byte(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("slimecli.weights.hub.SPARE_BYTES", 10**18)
    assert run(["download", f"file://{model}", "--out", str(tmp_path / "copy")]) == 1
    assert "needs 1000000000.00 GB" in capsys.readouterr().err and not (tmp_path / "copy").exists()


def test_a_process_of_its_own_with_the_environment_alone(hub, tmp_path):
    """HF_ENDPOINT and HF_HUB_OFFLINE as a user sets them, Ctrl-C in the middle, and the next call goes on."""
    size = 400_000
    hub.add("me/big", {"model.safetensors": os.urandom(size)}, kind="dataset")
    hub.slow["model.safetensors"] = 30.0
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_COLOR": "1"}
    code = "from slimecli.cli import main; main()"
    command = [sys.executable, "-c", code, "download", "me/big", "--dataset", "--json"]
    slow = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "hf" / "hub" / "datasets--me--big" / "blobs"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not [
        p for p in partial.glob("*.incomplete") if p.stat().st_size >= size // 4
    ]:
        time.sleep(0.05)
    slow.send_signal(signal.SIGINT)
    _, err = slow.communicate(timeout=60)
    assert slow.returncode == 130 and "goes on from there" in err, err
    hub.seen.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert hub.bodies("model.safetensors")[0].headers["range"].startswith("bytes=")
    assert 0 < json.loads(done.stdout)["fetched_bytes"] < size
    offline = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and json.loads(again.stdout)["source"] == "cache", again.stderr
