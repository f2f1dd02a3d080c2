import json

import pytest
import torch

from slimecli.cli import run
from slimecli.weights.hf import HfFolder
from tests.models import tiny_model


def test_there_and_back(tmp_path, capsys):
    hf = tiny_model(tmp_path / "hf", "llama")
    assert run(["convert", "--hf", str(hf), "--to", "torch_dist", "--out", str(tmp_path / "td"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True
    args = [
        "convert",
        "--from",
        str(tmp_path / "td"),
        "--to",
        "hf",
        "--out",
        str(tmp_path / "b"),
        "--dtype",
        "bfloat16",
    ]
    assert run(args) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "b")
    before, after = HfFolder(hf), HfFolder(tmp_path / "b")
    assert all(torch.equal(before.read(n).bfloat16(), after.read(n)) for n in before.names)


def test_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "--model", "qwen3-0.6b", "--to", "torch_dist", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes"] == 2 * 596_049_920
    assert {"model.layers.27.mlp.up_proj.weight", "model.norm.weight"} <= {t["hf"] for t in plan["tensors"]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--to", "hff"], 2, "did you mean 'hf'"),
        (["--to", "torch_dist"], 2, "--model NAME or --hf DIR"),
        (["--to", "hf", "--out", "x"], 2, "--from DIR"),
        (["--to", "torch_dist", "--hf", "./nowhere", "--out", "x"], 4, "not a folder"),
        (["--to", "torch_dist", "--hf", "qwen3-0.6", "--out", "x"], 2, "did you mean 'qwen3-0.6b'"),
        (["--to", "torch_dist", "--model", "qwen3-4b", "--model", "qwen3-8b", "--out", "x"], 2, "one registry name"),
        (["--to", "torch_dist", "--hf", "./nowhere", "--quantize", "fp8"], 2, "not quantised"),
        (["--to", "hf", "--from", "./x", "--quantize", "fp9", "--out", "x"], 4, "no torch_dist checkpoint"),
        (["--to", "torch_dist", "--hf", "./nowhere", "--out", "x", "--dtype", "int8"], 2, "bfloat16"),
        (["--to", "hf", "--from", "nowhere", "--out", "x"], 4, "no torch_dist checkpoint"),
    ],
)
def test_mistakes_are_explained(args, code, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["convert", *args]) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
