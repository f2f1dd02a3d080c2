import json

import pytest

from slimecli import cli, files
from slimecli.rundir import open_run
from tests.data_tools.conftest import tokenizer_dir  # noqa: F401

SMALL = ["--set", "data.count=300", "--set", "data.holdout=10"]


def slime(*words):
    return cli.run(["prepare-data", *map(str, words)])


def questions(path, n=3):
    path.write_text("".join(json.dumps({"question": f"q{i}", "label": "x"}) + "\n" for i in range(n)))
    return path


def test_into_a_new_run_then_skipped_then_mended(runs_root, capsys):
    assert slime("--recipe", "quickstart", "--run", "q", *SMALL, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    run = open_run("q")
    assert files.is_committed(run.data_dir) and shown["kept"] == {"train": 300, "holdout": 10, "sft": 300}
    report = files.read_json(run.data_dir / files.DONE)
    assert report["kept"] == shown["kept"] and report["dropped"] == shown["dropped"]
    record = files.read_json(run.stage_path("data"))
    assert record["status"] == "done"
    before, made = files.sha256(run.data_dir), run.data_dir.stat().st_mtime_ns
    assert slime("--run", "q") == 0
    assert "nothing changed" in capsys.readouterr().err and run.data_dir.stat().st_mtime_ns == made
    (run.data_dir / "train.jsonl").unlink()
    assert slime("--run", "q") == 0
    assert run.data_dir.stat().st_mtime_ns != made and files.sha256(run.data_dir) == before


def test_own_file_into_a_folder(tmp_path, capsys):
    path, out = questions(tmp_path / "in.jsonl"), tmp_path / "out"
    assert slime("--input", path, "--out", out, "--set", "data.input_key=question") == 0
    assert len((out / "train.jsonl").read_text().splitlines()) == 3
    assert "lengths were not measured" in capsys.readouterr().err
    assert slime("--input", path, "--out", out) == 4
    assert "no column 'prompt'; the columns are: label, question" in capsys.readouterr().err
    assert files.is_committed(out), "a failure must not touch what was there"


def test_lengths_are_measured_with_a_model(tmp_path, tokenizer_dir, capsys):  # noqa: F811
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "1", "label": "x"}\n{"prompt": "111111111111111111", "label": "x"}\n')
    words = ["--input", path, "--out", tmp_path / "o", "--model", tokenizer_dir, "--set", "data.max_prompt_tokens=20"]
    assert slime(*words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dropped"] == {"too long": 1} and report["length_checked"]


def test_a_foreign_folder_is_not_replaced(tmp_path, capsys):
    path = questions(tmp_path / "in.jsonl")
    assert slime("--input", path, "--out", tmp_path, "--set", "data.input_key=question") == 2
    assert "was not made by slime prepare-data" in capsys.readouterr().err and path.is_file()


def test_fewer_rows_than_a_batch(runs_root, tmp_path, capsys):
    path = questions(tmp_path / "in.jsonl")
    words = ["--input", path, "--run", "small", "--set", "data.input_key=question", "--set", "rollout.batch_size=8"]
    assert slime(*words) == 4
    assert "3 prompts are fewer than one batch (rollout.batch_size = 8)" in capsys.readouterr().err
    assert not files.is_committed(open_run("small").data_dir)
    assert files.read_json(open_run("small").stage_path("data"))["status"] == "failed"


def test_show_prints_every_token_with_its_mask(tmp_path, tokenizer_dir, capsys):  # noqa: F811
    path = tmp_path / "in.jsonl"
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "46"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    assert slime("--input", path, "--out", tmp_path / "o", "--model", tokenizer_dir, "--show", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sft.jsonl\t") and len(lines) == 14
    assert [line.split("\t")[2] for line in lines if line.startswith("  1")] == ["'4'", "'6'", "'<|im_end|>'"]


def test_masks_stand_under_their_own_rows_and_the_recipes_tokenizer_will_do(tmp_path, tokenizer_dir, capsys):  # noqa: F811
    path = tmp_path / "in.jsonl"
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "46"}]
    rows = [{"prompt": f"p{i}", "label": "x"} for i in range(4)] + [{"messages": chat}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--input", path, "--out", tmp_path / "o", "--set", f"model.path={tokenizer_dir}", "--show", 3, "--json"]
    assert slime(*words) == 0
    shown = json.loads(capsys.readouterr().out)["shown"]
    assert [(entry["file"], "tokens" in entry) for entry in shown] == [("train.jsonl", False)] * 3 + [
        ("sft.jsonl", True)
    ]
    assert [text for _, text, trained in shown[-1]["tokens"] if trained] == ["4", "6", "<|im_end|>"]


def test_skip_broken_counts(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "label": "x"}\n{"prompt": \n')
    assert slime("--input", path, "--out", tmp_path / "o") == 4
    assert "in.jsonl:2:12" in capsys.readouterr().err
    assert slime("--input", path, "--out", tmp_path / "o", "--set", "data.skip_broken=true") == 0
    assert "dropped 1: broken" in capsys.readouterr().err


def test_list_and_usage(capsys, runs_root):
    assert slime("--list") == 0
    out = capsys.readouterr().out
    assert "reasoning_gym:basic_arithmetic" in out and "column_addition" in out
    assert slime("--input", "x.jsonl") == 2
    assert slime("--recipe", "grpo", "--run", "empty") == 2
    assert "names no data" in capsys.readouterr().err
    assert slime("--run", "nothing") == 2
    assert "slime prepare-data --recipe quickstart" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--run", "q", "--recipe", "quickstart"]])
def test_a_run_keeps_its_recipe(runs_root, capsys, words):
    assert slime("--recipe", "quickstart", "--run", "q", *SMALL) == 0
    assert slime(*words) == 2
    assert "has its recipe already" in capsys.readouterr().err


def test_a_model_folder_without_tokenizer_is_named(tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300}))
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "What is 1 + 1?", "label": "2"}) + "\n")
    code = slime("--input", path, "--out", tmp_path / "out", "--model", bare)
    assert code == 4 and "no usable tokenizer" in capsys.readouterr().err
