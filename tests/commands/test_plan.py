import json
import shlex

from slimecli.cli import run
from slimecli.commands.plan import plan
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run


def test_a_plan_says_value_and_reason(capsys):
    assert run(["plan", "--recipe", "quickstart"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("what\tvalue\twhy\n")
    assert "disk: total\t" in out
    assert "slime run --recipe quickstart" in err


def test_the_command_it_ends_with_is_of_the_same_model(capsys):
    given = ["--recipe", "reverse", "--model", "quickstart", "--set", "title='a b'"]
    assert run(["plan", *given]) == 0
    line = next(x for x in capsys.readouterr().err.splitlines() if "slime run" in x)
    assert shlex.split(line, comments=True) == ["slime", "run", *given]


def test_json_is_data_only(capsys):
    assert run(["plan", "--recipe", "quickstart", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {v["name"] for v in data["values"]} >= {"answers", "KV cache, at most", "optimizer"}


def test_all_problems_are_told_and_exit_2(capsys):
    assert run(["plan", "--recipe", "quickstart", "--set", "rollout.batch_size=7", "--set", "algo.name=grop"]) == 2
    err = capsys.readouterr().err
    assert "2 problem(s)" in err
    assert "nearest: " in err
    assert "did you mean 'grpo'?" in err


def test_wrong_entries_do_not_hide_what_else_is_wrong(capsys):
    def told(*words):
        assert run(["plan", "--recipe", "quickstart", *(x for w in words for x in ("--set", w))]) == 2
        return capsys.readouterr().err

    err = told(
        "trainer.lrr=1", "rollout.top_p=3", "data.holdout='x'", "trainer.global_batch_size=100", "algo.name=grop"
    )
    assert "5 problem(s)" in err and "`rollout.top_p`" in err and "did you mean 'trainer.lr'?" in err
    assert "nearest: " in err and "did you mean 'grpo'?" in err
    for wrong in ("rollout.batch_size='many'", "rollout.batch_sise=64", "trainr.lr=1", "steps=-1"):
        assert "1 problem(s)" in told(wrong, "rollout.n_samples_per_prompt=7"), "what may only follow from it"


def test_a_run_is_planned_with_its_own_recipe_and_changes(runs_root):
    create_run("demo", load_recipe("quickstart"))
    longer = plan(run="demo", overrides=("steps=70",))
    assert longer.value("work", "RL steps") == 70


def test_what_to_plan_must_be_said_once(capsys):
    assert run(["plan"]) == 2
    assert run(["plan", "--run", "x", "--recipe", "quickstart"]) == 2


def test_measure_adds_the_time():
    found = plan("quickstart", measured=True)
    assert float(found.value("time", "whole run, arithmetic only")) > 0.1
