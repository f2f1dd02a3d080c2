import os
import subprocess
import sys

import pytest

from slimecli import files
from slimecli.observe.records import read_run, run_status
from slimecli.observe.summary import next_commands, summarise, summary_lines
from slimecli.recipe import validate_recipe
from slimecli.rundir import create_run
from tests.observe.made_run import make_run


def test_before_and_after_come_from_the_first_and_last_evaluation(tmp_path):
    data = summarise(make_run(tmp_path / "runs" / "demo"))
    assert data["steps"] == 4
    assert data["accuracy"]["holdout"]["greedy"] == (0.2, pytest.approx(0.9))
    assert data["reward"] == (pytest.approx(0.3), pytest.approx(0.6))
    assert data["stage_seconds"] == {"data": 1.5, "loop": 12.0}
    assert data["phase_seconds"]["learn"] == pytest.approx(8.0)
    assert "measure" not in data["phase_seconds"]


def test_the_screen_says_before_after_time_and_what_to_type(tmp_path):
    run = make_run(tmp_path / "runs" / "demo")
    text = "\n".join(summary_lines(summarise(run)))
    assert "holdout accuracy, sampled" in text
    assert "90.0%" in text
    assert "time per stage: 14 s = data 1.5 s (11%) + loop 12 s (89%)" in text
    commands = [c.split(" --run ")[0] for c, _ in next_commands(run)]
    assert commands == ["slime report", "slime eval", "slime serve", "slime export"]
    assert all(str(run.root) in c or c.endswith(" demo") for c, _ in next_commands(run))


def test_an_unfinished_run_is_told_to_go_on(tmp_path):
    run = make_run(tmp_path / "r")
    run.rewind(2)
    assert next_commands(run)[0] == (f"slime run --resume --run {run.root}", "go on to step 4")


def test_a_run_without_any_record_is_new_and_summarised_as_empty(tmp_path):
    run = create_run(str(tmp_path / "r"), validate_recipe({}))
    assert run_status(run, read_run(run)) == "new"
    assert summary_lines(summarise(run)) == ["", f"run {run.root}: 0 steps"]


def test_status_words(tmp_path):
    run = make_run(tmp_path / "r")
    assert run_status(run, read_run(run)) == "done"
    with run.lock():
        assert run_status(run, read_run(run)) == "running"
    assert run_status(run, read_run(run)) == "done"
    files.write_json(run.stage_path("loop"), {"stage": "loop", "status": "interrupted", "seconds": 1.0})
    run.metrics_path.write_text('{"step": 1}\n')
    assert run_status(run, read_run(run)) == "stopped"
    files.write_json(run.error_path, {"what": "boom"})
    assert run_status(run, read_run(run)) == "failed"


def test_a_killed_writer_does_not_look_alive(tmp_path):
    run = make_run(tmp_path / "r")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom slimecli.rundir import RunDir\n"
        f"with RunDir(Path({str(run.root)!r})).lock():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert "process" in (run.root / ".lock").read_text()
    assert not run.is_locked()
    # a reused process number is told apart by the kernel's own lock
    (run.root / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}")
    assert not run.is_locked()
