import json
import time

import pytest
import torch

from slimecli.cli import run
from slimecli.commands.convert import dry_run
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


def test_a_folder_in_the_wrong_place_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "hf")
    tiny_model(tmp_path / "other", seed=1)
    assert run(["convert", "--hf", "./hf", "--to", "torch_dist", "--out", "td"]) == 0
    (tmp_path / "file").write_text("x")
    for words, code, said in [
        (["--hf", "./td", "--to", "torch_dist", "--out", "x"], 2, "torch_dist checkpoint already"),
        (["--hf", "./hf", "--to", "hf", "--out", "x"], 2, "--from DIR"),
        (["--hf", "./hf", "--to", "hf", "--dry-run"], 2, "--from DIR"),
        (["--from", "./hf", "--to", "hf", "--out", "x"], 4, "an HF folder is named by --hf"),
        (["--from", "./absent", "--model", "qwen3-4b", "--to", "hf", "--dry-run"], 4, "no torch_dist checkpoint"),
        (["--hf", "./hf", "--to", "torch_dist", "--out", "./hf/td"], 2, "lies in, or contains"),
        (["--hf", "./hf", "--to", "torch_dist", "--out", "file/td"], 2, "is a file, not a folder"),
        (["--hf", "./hf", "--to", "torch_dist", "--out", "n" * 300], 1, "choose a shorter name"),
        (["--hf", "./other", "--to", "torch_dist", "--out", "td"], 2, "holds a conversion of"),
        (["--from", "./td", "--to", "hf", "--out", "td"], 2, "lies in, or contains"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        assert run(["convert", *words]) == code, words
        assert said in " ".join(capsys.readouterr().err.split()), words
        assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_the_folder_that_it_stands_for(tmp_path):
    hf = tiny_model(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    for name, target in (("a", "empty"), ("b", "absent")):
        (tmp_path / name).symlink_to(tmp_path / target)
        assert run(["convert", "--hf", str(hf), "--to", "torch_dist", "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).is_symlink() and (tmp_path / target / "DONE.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "absent", "b", "empty", "hf"]


def test_a_plan_states_the_bytes_that_are_written(tmp_path, capsys):
    hf = tiny_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    td = tmp_path / "td"
    ways = [
        ["--hf", str(hf), "--to", "torch_dist", "--out", str(td)],
        ["--from", str(td), "--to", "hf", "--out", str(tmp_path / "a")],
        ["--from", str(td), "--to", "hf", "--out", str(tmp_path / "b"), "--dtype", "float32"],
        ["--from", str(td), "--to", "hf", "--out", str(tmp_path / "c"), "--quantize", "fp8"],
    ]
    for words in ways:
        assert run(["convert", *words, "--dry-run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert run(["convert", *words, "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert plan["bytes_written"] == done["bytes"] and plan["seconds_at_1_gb_per_s"] == 0
    assert run(["convert", "--from", str(td), "--to", "hf", "--dry-run", "--quantize", "int4"]) == 2
    assert run(["convert", "--hf", str(hf), "--to", "torch_dist", "--dry-run", "--quantize", "fp8"]) == 2


def test_a_certificate_of_something_else_is_told(tmp_path, capsys):
    hf, td = tiny_model(tmp_path / "hf"), tmp_path / "td"
    assert run(["convert", "--hf", str(hf), "--to", "torch_dist", "--out", str(td)]) == 0
    (td / "certificate.json").write_text("{}")
    assert run(["convert", "--from", str(td), "--to", "hf", "--out", str(tmp_path / "x")]) == 4
    assert "is no certificate of slime" in capsys.readouterr().err


def test_a_tokenizer_file_of_another_kind_is_told(tmp_path, capsys):
    hf = tiny_model(tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    assert run(["convert", "--hf", str(hf), "--to", "torch_dist", "--out", str(tmp_path / "td")]) == 4
    assert "is no fast tokenizer" in capsys.readouterr().err


def test_a_plan_of_the_largest_model_is_quick():
    start = time.process_time()
    plan = dry_run(to="hf", model=["deepseek-v3"], quantize="fp8")
    assert len(plan["tensors"]) > 40_000 and 0.6e12 < plan["bytes"] < 0.8e12
    assert time.process_time() - start < 15
