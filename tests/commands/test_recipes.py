import json

import pytest

from slimecli.cli import run
from slimecli.commands.recipes import copy_recipe, list_algorithms, list_fields, list_recipes, show_recipe
from slimecli.errors import UsageError
from slimecli.recipe import load_recipe


def test_list_names_every_recipe_with_its_title(capsys):
    rows = {r["name"]: r for r in list_recipes()}
    assert rows["quickstart"]["title"]
    assert run(["recipes"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("name\ttitle\n")
    assert "quickstart\t" in out
    assert "slime run" in err


def test_show_prints_the_file_itself(capsys):
    assert run(["recipes", "show", "quickstart"]) == 0
    assert capsys.readouterr().out == show_recipe("quickstart")


def test_copy_never_overwrites(tmp_path):
    target = tmp_path / "mine.toml"
    assert copy_recipe("quickstart", str(target)) == str(target)
    assert load_recipe(str(target)) == load_recipe("quickstart")
    with pytest.raises(UsageError, match="exists already"):
        copy_recipe("quickstart", str(target))


def test_fields_and_algorithms_come_with_help(capsys):
    assert {"field": "trainer.lr", "default": 1e-6, "help": "peak learning rate"} in list_fields()
    names = {a["name"]: a["does"] for a in list_algorithms()}
    assert names.keys() >= {"grpo", "sft"}
    assert all(names.values())
    assert run(["recipes", "--fields", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 80


@pytest.mark.parametrize("argv", [["show"], ["copy", "quickstart"], ["delete", "quickstart"]])
def test_half_a_command_is_a_usage_error(argv, capsys):
    assert run(["recipes", *argv]) == 2
    assert "not complete" in capsys.readouterr().err


def test_resolved_is_what_a_run_keeps(capsys):
    assert run(["recipes", "show", "quickstart", "--resolved", "--set", "steps=7"]) == 0
    assert capsys.readouterr().out == load_recipe("quickstart", ("steps=7",)).to_json()
