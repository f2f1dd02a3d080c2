"""Every line of docs/offline.md's shell blocks runs in bash, in order, in one folder."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slimecli.types import Sample
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
seed = 3
[rollout]
n_samples_per_prompt = 2
batch_size = 4
max_response_tokens = 6
[reward]
path = "tests.tiny_run:even_share"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("offline")
    tiny_model(place / "model")
    (place / "offline.toml").write_text(RECIPE)
    rows = [{"prompt": f"What is {i} + 3?", "label": "x"} for i in range(6)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = place / "bin" / "slime"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m slimecli "$@"\n')
    program.chmod(0o755)
    return place


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(1500)
def test_the_pipelines(folder):
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "offline.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        script = f"set -euo pipefail\nexport PATH={folder / 'bin'}:$PATH\n{block}"
        ended = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert "Traceback" not in ended.stderr and "BrokenPipe" not in ended.stderr
        if block is blocks[0]:
            samples, good, sft = (lines(folder / name) for name in ("samples.jsonl", "good.jsonl", "sft.jsonl"))
    assert len(samples) == 12 and [s["group_index"] for s in samples] == sorted(s["group_index"] for s in samples)
    assert good == [s for s in samples if s["reward"] >= 0.5]
    assert lines(folder / "first.jsonl") == samples[:1]
    assert all(row["messages"][-1]["role"] == "assistant" for row in sft)
    assert lines(folder / "prepared" / "sft.jsonl") == [{k: row[k] for k in ("messages", "metadata")} for row in sft]
    parts = lines(folder / "samples.jsonl")
    assert sorted(parts, key=lambda s: s["index"]) == samples


def test_every_field_of_a_sample_is_told():
    text = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    table = text.partition("### Samples")[2].partition("### SFT rows")[0]
    told = {
        name for line in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert told == {f.name for f in fields(Sample)} - {"non_generation_time"}, "the latter is not a part of the JSON"
