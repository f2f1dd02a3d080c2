import json

from slimecli.cli import run
from slimecli.commands.runs import list_all, show_run
from tests.observe.made_run import make_run


def test_runs_are_listed_with_what_they_reached(runs_root, capsys):
    make_run(runs_root / "first")
    (row,) = list_all()
    assert row | {"created": ""} == {
        "run": "first",
        "status": "done",
        "step": "4/4",
        "reward": 0.6,
        "held-out": 0.9,
        "spec": "",
        "created": "",
        "title": "made for tests",
    }
    assert run(["runs"]) == 0
    assert "first\tdone\t4/4\t0.6\t0.9" in capsys.readouterr().out


def test_a_broken_run_does_not_hide_the_others(runs_root):
    make_run(runs_root / "good")
    make_run(runs_root / "bad")
    (runs_root / "bad" / "recipe.json").write_text("{")
    assert {r["run"]: r["status"] for r in list_all()} == {"good": "done", "bad": "unreadable"}


def test_show_tells_stages_checkpoints_and_the_error(runs_root, capsys):
    made = make_run(runs_root / "first")
    made.error_path.write_text('{"what": "the disk was full"}')
    found = show_run("first")
    assert [s["stage"] for s in found["stages"]] == ["data", "loop"]
    assert found["error"]["what"] == "the disk was full"
    assert run(["runs", "show", "first"]) == 0
    out = capsys.readouterr().out
    assert "error\tthe disk was full" in out
    assert "stage\tloop\tdone\t12.0 s" in out
    assert run(["runs", "show", "first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["steps"] == 4


def test_no_runs_say_how_to_make_one(runs_root, capsys):
    assert run(["runs"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "slime run --recipe quickstart" in err
    assert run(["runs", "show"]) == 2
