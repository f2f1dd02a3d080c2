"""Generators of prompts and their levels, checked without importing them."""

import dataclasses
import sys

import pytest

from slimecli import cli
from slimecli.plan_source import _argument_problem, check_source, file_of, known_tasks, read_task
from slimecli.recipe import validate_recipe


def problems(task="chain_sum", curriculum=None, **args):
    data = {"source": f"reasoning_gym:{task}", "source_args": args, "curriculum": curriculum or {}}
    return list(check_source(validate_recipe({"data": data})))


def test_what_is_read_is_what_reasoning_gym_does():
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    assert known_tasks() == sorted(DATASETS)
    for name, (_, config) in DATASETS.items():
        task = read_task(file_of(name), name)
        fields = dataclasses.fields(config)
        assert list(task.arguments) == [f.name for f in fields]
        defaults = {f.name: f.default for f in fields if f.default not in (dataclasses.MISSING, None)}
        assert [_argument_problem(task, k, v) for k, v in defaults.items()] == [""] * len(defaults), name
        levels = [len(a.levels) for a in create_curriculum(name).attributes.values()] if name in CURRICULA else [0]
        assert task.levels == max(levels, default=None), name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"task": "chain_summ"}, "reasoning-gym has no data set 'chain_summ' (did you mean 'chain_sum'?)"),
        ({"max_digit": 3}, "`data.source_args`: chain_sum has no argument 'max_digit' (did you mean 'max_digits'?)"),
        ({"max_digits": "three"}, "chain_sum has 'max_digits' = 'three': give a whole number"),
        ({"max_digits": True}, "give a whole number"),
        ({"question": 7}, "chain_sum has 'question' = 7: give a text"),
        (
            {"curriculum": {"levels": [{"max_digits": 2}, {"max_digitz": 4}]}},
            "`data.curriculum.levels[1]`: chain_sum has no argument 'max_digitz'",
        ),
        ({"curriculum": {"auto_levels": 99}}, "= 99, but the curriculum of chain_sum has 11 levels"),
        ({"task": "list_functions", "curriculum": {"auto_levels": 2}}, "no curriculum for list_functions; state the"),
    ],
)
def test_each_mistake_is_told(arguments, expected):
    (problem,) = problems(**arguments)
    assert expected in problem


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_digits": 3, "question": "{question}?", "partial": True},
        {"curriculum": {"auto_levels": 4}},
        {"curriculum": {"levels": [{"max_digits": 1}, {"max_digits": 2}]}, "allow_negation": False},
    ],
)
def test_what_is_right_is_not_told(arguments):
    assert problems(**arguments) == []


def test_plan_tells_it_and_imports_nothing_for_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    sets = ["data.curriculum.levels=[{max_digit=2}, {max_digits=3}]", "data.source=reasoning_gym:chain_sum"]
    words = [word for text in sets for word in ("--set", text)]
    assert cli.run(["plan", "--recipe", "quickstart", *words]) == 2
    assert "`data.curriculum.levels[0]`: chain_sum has no argument 'max_digit'" in capsys.readouterr().err
    assert "reasoning_gym" not in sys.modules
