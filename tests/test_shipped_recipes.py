"""Every recipe that is shipped really trains, shrunk to seconds; one that wants a model and data gets its own."""

from __future__ import annotations

import json

import pytest

from slimecli.recipe import load_recipe, shipped_recipes
from tests.forked import succeed
from tests.known_sets import KNOWN
from tests.models import tiny_model
from tests.tiny_run import TINY, metrics

SMALL = tuple(item for item in TINY if not item.startswith(("data.", "reward.")))


def row(i):
    """Prompt with a checkable answer, and a conversation."""
    question = {"role": "user", "content": f"What is {i} + 3?"}
    messages = [question, {"role": "assistant", "content": f"The answer is {i + 3}"}]
    return {"prompt": question["content"], "label": str(i + 3), "messages": messages}


TRAINING = [name for name in shipped_recipes() if not load_recipe(name).only_evaluates]
"""those that only evaluate: tests/test_known_sets.py"""


@pytest.mark.parametrize("name", TRAINING)
def test_it_trains(name, tmp_path):
    recipe = load_recipe(name)
    changes = [*SMALL, f"steps={min(recipe.steps, 2)}", f"sft.steps={min(recipe.sft.steps, 2)}", "gates.action=warn"]
    if recipe.data.source:
        changes += ["data.count=60", "data.holdout=4"]
        words = []
    elif name in KNOWN:
        (tmp_path / "copy").mkdir()
        changes += [*KNOWN[name](tmp_path / "copy"), "data.holdout=0", "data.max_prompt_tokens=480"]
        changes += ["rollout.dynamic_filter=''", "eval.interval=0", "trainer.steps_per_rollout=1"]
        changes += ["tools.call_format=hermes"] if recipe.tools.use else []
        words = ["--model", str(tiny_model(tmp_path / "model", max_position_embeddings=1024))]
    else:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row(i)) + "\n" for i in range(24)))
        changes += ["data.holdout=0", "data.max_prompt_tokens=64", "rollout.dynamic_filter=''"]
        words = ["--model", str(tiny_model(tmp_path / "model")), "--set", f"data.train={data}"]
    sets = [word for change in changes for word in ("--set", change)]
    succeed("run", "--recipe", name, "--run", "r", *words, *sets, folder=tmp_path)
    run = tmp_path / "runs" / "r"
    assert (run / "export" / "model.safetensors").is_file()
    done = metrics(run) if recipe.steps else metrics(run / "sft")
    assert [r["step"] for r in done if r["step"]] == [1, 2]
    assert all("train/loss" in r for r in done if r["step"])
