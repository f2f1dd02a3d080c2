"""The recipes of well-known sets: columns, prompts and scorers, on local copies in the published layout."""

import asyncio
import json

import pytest

from slimecli import cli, files
from slimecli.data_tools.columns import read_item
from slimecli.data_tools.formats import read_rows
from slimecli.data_tools.prompts import load_prompts
from slimecli.data_tools.rewards import load_reward
from slimecli.errors import DataError
from slimecli.plan_checks import check_names
from slimecli.recipe import load_recipe, override_recipe, shipped_recipes, validate_recipe
from slimecli.recipe_sections import DataSection
from slimecli.rollout.args import HookArgs
from slimecli.rollout.eval_sets import set_recipe
from slimecli.types import Sample
from tests.known_sets import KNOWN
from tests.models import tiny_model, tiny_tokenizer

RIGHT = {
    "gsm8k": lambda row: rf"so \boxed{{{row['label']}}}",
    "math": lambda row: rf"so \boxed{{{row['label']}}}",
    "dapo-math-17k": lambda row: f"so\nAnswer: {row['label']}",
    "deepscaler": lambda row: rf"<think>x</think> \boxed{{{row['label']}}}",
    "search-r1": lambda row: f"<answer>{row['golds'][1].lower()}</answer>",
    "tool-calls": lambda row: f"<tool_call>\n{json.dumps(json.loads(row['label'])[0])}\n</tool_call>",
}


def overrides(name, folder):
    folder.mkdir(exist_ok=True)
    return tuple(KNOWN[name](folder))


def score(recipe, response, label, metadata):
    sample = Sample(response=response, label=label, metadata=metadata)
    value = asyncio.run(load_reward(recipe.reward)(HookArgs(recipe), sample))
    return value if isinstance(value, float) else value[recipe.reward.key or "score"]


def test_there_is_a_copy_for_every_recipe_that_names_the_hub():
    named = [name for name, path in shipped_recipes().items() if "hf://" in path.read_text()]
    assert sorted(named) == sorted(KNOWN)


@pytest.mark.parametrize("name", RIGHT)
def test_prepared_rows_are_scored_by_the_recipe(name, tmp_path, capsys):
    changes = overrides(name, tmp_path / "copy")
    recipe = load_recipe(name, changes)
    words = ["--recipe", name, "--out", tmp_path / "out", *[w for c in changes for w in ("--set", c)]]
    words += ["--set", "data.holdout=0", "--set", "rollout.batch_size=4", "--set", "model.name=", "--json"]
    assert cli.run(["prepare-data", *map(str, words)]) == 0
    report = json.loads(capsys.readouterr().out)
    overlap = report["dropped"].get("overlap with evaluation", 0)
    assert report["kept"]["train"] + overlap == 24 and set(report["dropped"]) <= {"overlap with evaluation"}
    rows = list(read_rows(str(tmp_path / "out" / "train.jsonl")))
    for row in rows[:3]:
        item = read_item(row, recipe.data, "again")  # what was prepared is read by the same recipe
        golds = {"golds": item.metadata.get("golds")}
        right = RIGHT[name]({"label": item.label, **golds})
        assert score(recipe, right, item.label, item.metadata) == 1.0
        assert score(recipe, right.replace(item.label, "zzz") + " nothing", item.label, item.metadata) < 1.0 or golds
        assert score(recipe, "nothing", item.label, item.metadata) < 1.0


@pytest.mark.parametrize("name", KNOWN)
def test_evaluation_sets_are_read_as_their_recipe_says(name, tmp_path):
    recipe = load_recipe(name, overrides(name, tmp_path / "copy"))
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    for settings in recipe.eval.sets.values():
        own = set_recipe(recipe, settings)
        prompts = load_prompts(settings.path, own.data, tokenizer)
        assert prompts and all(p.label for p in prompts)
        before, after = own.data.prompt_template.split("{prompt}") if own.data.prompt_template else ("", "")
        assert all(before in p.text and after.strip() in p.text for p in prompts)


def test_plan_accepts_them(tmp_path, capsys):
    """On a model and lengths that fit this machine."""
    model = tiny_model(tmp_path / "model")
    for name in KNOWN:
        small = (
            "data.max_prompt_tokens=64",
            "rollout.max_response_tokens=8",
            "engine.slots=8",
            "trainer.warmup_steps=0",
        )
        batch = ("rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "trainer.global_batch_size=16")
        words = [*overrides(name, tmp_path / name), *small, *batch, "trainer.steps_per_rollout=1", "data.holdout=4"]
        code = cli.run(["plan", "--recipe", name, "--model", str(model), *[w for c in words for w in ("--set", c)]])
        assert code == 0, (name, capsys.readouterr().err)


def test_choices_are_shuffled_by_the_row_alone(tmp_path):
    recipe = load_recipe("gpqa", overrides("gpqa", tmp_path / "copy"))
    rows = list(read_rows(recipe.eval.sets["gpqa"].path))
    items = [read_item(row, recipe.data, "x") for row in rows]
    again = [read_item(row, recipe.data, "x") for row in reversed(rows)]
    assert items == again[::-1]
    for i, item in enumerate(items):
        letter = item.label
        assert f"{letter}) right {i}" in item.prompt and item.prompt.startswith("Which, of these?\n")
        assert score(recipe, f"Answer: {letter}", letter, item.metadata) == 1.0
        assert score(recipe, f"Answer: {'ABCD'[('ABCD'.index(letter) + 1) % 4]}", letter, item.metadata) == 0.0
    assert len({item.label for item in items}) > 1


def test_functions_become_what_templates_take(tmp_path):
    recipe = load_recipe("tool-calls", overrides("tool-calls", tmp_path / "copy"))
    row = next(iter(read_rows(recipe.data.train)))
    (tool,) = read_item(row, recipe.data, "x").tools
    schema = tool["function"]["parameters"]
    assert schema["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}} and schema["required"] == ["a"]


def test_rows_of_another_layout_are_refused():
    section = DataSection(convert="gsm8k")
    with pytest.raises(DataError, match="reads the columns question, answer; the row has query"):
        read_item({"query": "x"}, section, "f row 1")
    with pytest.raises(DataError, match="f row 1: gsm8k cannot convert the row: ValueError: the answer has no ####"):
        read_item({"question": "x", "answer": "4"}, section, "f row 1")


def test_an_evaluation_recipe_is_for_slime_eval(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tmp_path / "model")
    small = [
        "rollout.max_response_tokens=4",
        "eval.n_samples_per_prompt=2",
        "data.max_prompt_tokens=400",
        *overrides("gpqa", tmp_path / "copy"),
    ]
    words = ["--recipe", "gpqa", "--model", str(model), *[w for c in small for w in ("--set", c)]]
    assert cli.run(["eval", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gpqa"]["sampled"]["n"] == 8
    assert cli.run(["run", *words, "--run", str(tmp_path / "r")]) == 2
    assert "slime eval --model DIR --recipe NAME" in capsys.readouterr().err
    assert not files.is_committed(tmp_path / "r" / "data")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"data": {"convert": "gsm8"}}, "`data.convert` = 'gsm8' is unknown (did you mean 'gsm8k'?)"),
        ({"data": {"convert": "none.py:f"}}, "`data.convert` = 'none.py:f': there is no file none.py"),
        ({"eval": {"sets": {"a": {"path": "x", "reward": "mth"}}}}, "`eval.sets.a.reward` = 'mth' is unknown"),
        ({"eval": {"sets": {"a": {"path": "x", "convert": "gpq"}}}}, "(did you mean 'gpqa'?)"),
    ],
)
def test_plan_knows_converters_and_the_scorers_of_sets(tree, message):
    assert [p for p in check_names(validate_recipe(tree), None) if message in p]


def test_a_set_that_is_a_path_can_be_given_further_values():
    changed = ("eval.sets.gsm8k.temperature=0.5", "eval.sets.gsm8k.path=copy#main/test")
    recipe = load_recipe("gsm8k", changed)
    assert recipe.eval.sets["gsm8k"].path == "copy#main/test" and recipe.eval.sets["gsm8k"].temperature == 0.5
    again = override_recipe(load_recipe("gsm8k"), changed[:1])
    assert again.eval.sets["gsm8k"].path == "hf://openai/gsm8k#main/test"
    assert validate_recipe(json.loads(recipe.to_json())) == recipe
