"""Data sets named by their place on the hub."""

import json

import pytest

from slimecli import cli
from slimecli.data_tools.formats import read_rows
from slimecli.errors import SlimeError, UsageError
from slimecli.weights.datasets import localise
from tests.data_tools.test_folders import HEAD

ROWS = b"".join(json.dumps({"question": f"q{i}", "answer": f"x #### {i}"}).encode() + b"\n" for i in range(3))
FILES = {
    "README.md": HEAD.encode(),
    "main/train-0.jsonl": ROWS,
    "main/test-0.jsonl": b'{"question": "q1", "answer": "a #### 1"}\n',
    "socratic/train-0.jsonl": ROWS,
}


def test_only_the_subset_that_is_wanted_is_fetched(online):
    online.add("openai/gsm8k", FILES, kind="dataset")
    place = localise("hf://openai/gsm8k#main/train@[0:2]")
    assert [row["question"] for row in read_rows(place)] == ["q0", "q1"]
    asked = [seen.path for seen in online.seen if "/resolve/" in seen.path]
    assert any("main/train-0.jsonl" in path for path in asked)
    assert not any("socratic" in path for path in asked)


def test_a_set_without_readme_and_a_revision(online):
    online.add("me/rows", {"data/train.jsonl": b'{"a": 1}\n'}, kind="dataset")
    assert list(read_rows(localise("hf://me/rows"))) == [{"a": 1}]
    assert list(read_rows(localise("hf://me/rows@main#train"))) == [{"a": 1}]
    assert localise("some/file.jsonl") == "some/file.jsonl"
    with pytest.raises(UsageError, match="is no data set on the hub"):
        localise("hf://rows")
    with pytest.raises(SlimeError):
        localise("hf://me/none")


def test_prepare_data_from_the_hub_leaves_out_what_is_evaluated(online, tmp_path, capsys):
    online.add("openai/gsm8k", FILES, kind="dataset")
    words = ["--input", "hf://openai/gsm8k#main/train", "--out", tmp_path / "out", "--set", "data.convert=gsm8k"]
    words += ["--set", "eval.sets.test=hf://openai/gsm8k#main/test", "--json"]
    assert cli.run(["prepare-data", *map(str, words)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kept"] == {"train": 2} and report["dropped"] == {"overlap with evaluation": 1}
    rows = list(read_rows(str(tmp_path / "out" / "train.jsonl")))
    assert [(r["prompt"], r["label"]) for r in rows] == [("q0", "0"), ("q2", "2")]
