import json
import threading
import time

from slimecli import files
from slimecli.cli import run
from slimecli.commands.watch import follow
from slimecli.recipe import validate_recipe
from slimecli.rundir import create_run
from tests.observe.made_run import make_run


def test_a_finished_run_is_shown_once_and_ends(runs_root, capsys):
    make_run(runs_root / "demo")
    assert run(["watch", "--run", "demo"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[2] for line in err.splitlines() if line.startswith("loop step")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]


def test_json_gives_every_record(runs_root, capsys):
    make_run(runs_root / "demo")
    assert run(["watch", "demo", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3, 4]
    assert {e["stage"]: e["status"] for e in events if e["kind"] == "stage"} == {"data": "done", "loop": "done"}


def test_a_run_is_followed_until_its_writer_is_gone(tmp_path):
    made = create_run(str(tmp_path / "demo"), validate_recipe({"steps": 3}))
    held = threading.Event()

    def work():
        with made.lock():
            held.set()
            for step in (1, 2, 3):
                time.sleep(0.15)
                made.append(made.metrics_path, {"step": step})
            files.write_json(made.stage_path("loop"), {"stage": "loop", "status": "done", "seconds": 0.5})

    writer = threading.Thread(target=work)
    writer.start()
    held.wait()
    events = list(follow(made, interval_s=0.05))
    writer.join()
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3]
    assert events[-1]["stage"] == "loop"


def test_the_exit_code_says_how_the_run_ended(runs_root, capsys):
    made = make_run(runs_root / "demo")
    files.write_json(made.stage_path("loop"), {"stage": "loop", "status": "interrupted", "seconds": 1.0})
    made.metrics_path.write_text('{"step": 1}\n')
    assert run(["watch", "demo"]) == 6
    assert "--resume" in capsys.readouterr().err
    files.write_json(made.error_path, {"what": "it broke", "fix": "mend it"})
    assert run(["watch", "demo"]) == 1
    assert "it broke\n  fix: mend it" in capsys.readouterr().err
    assert run(["watch"]) == 2
