import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimecli import __version__, cli, console
from slimecli.errors import GateError, SlimeError
from slimecli.recipe import load_recipe, validate_recipe
from slimecli.rundir import create_run

ROOT = Path(__file__).resolve().parents[1]
SLIME = [sys.executable, "-c", "from slimecli.cli import main; main()"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of the command `recipes`."""

    def place(function):
        monkeypatch.setattr("slimecli.commands.recipes.cli", function)

    return place


def test_no_command_shows_the_help_and_is_a_usage_error(capsys):
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert "The whole way" in out
    assert "One stage alone" in out
    assert err == ""


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"slime {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["rum"], "run"),
        (["plan", "--recipie", "x"], "no option --recipie (did you mean '--recipe'?)"),
        (["plan", "--recipe"], "option '--recipe' requires an argument"),
        (["plan", "surplus"], "surplus"),
    ],
)
def test_usage_errors_are_one_message_and_exit_2(argv, expected, capsys):
    assert cli.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 2
    assert "--help" in err.splitlines()[1]


def test_a_closed_stdout_is_no_bug():
    done = subprocess.run(["sh", "-c", '"$@" models >&-', "sh", *SLIME], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_exit_code_is_that_of_the_error(command, capsys):
    def raises() -> None:
        raise GateError("the gap is too large", "look at it")

    command(raises)
    assert cli.run(["recipes"]) == 5
    assert capsys.readouterr().err == "error: the gap is too large\n  fix: look at it\n"


def test_debug_shows_the_traceback_wherever_it_stands(command, capsys):
    def raises() -> None:
        raise SlimeError("what", "fix")

    command(raises)
    assert cli.run(["recipes", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert cli.run(["recipes"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_called_a_bug_and_its_traceback_is_kept(command, capsys):
    def raises() -> None:
        raise ZeroDivisionError("seven")

    command(raises)
    assert cli.run(["recipes"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: seven\n")
    assert "bug in slime" in err
    assert "Traceback" not in err
    kept = Path(re.search(r"traceback: (\S+)", err)[1])
    assert "ZeroDivisionError: seven" in kept.read_text()
    kept.unlink()


def test_the_traceback_of_a_bug_in_a_run_goes_into_the_run(runs_root, monkeypatch, capsys):
    run = create_run("demo", validate_recipe({}))
    monkeypatch.setattr("slimecli.commands._stages.run_and_recipe", lambda *a, **k: 1 / 0)
    assert cli.run(["train", "--run", "demo"]) == 1
    assert str(run.error_path) in capsys.readouterr().err
    stored = json.loads(run.error_path.read_text())
    assert stored["what"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in stored["traceback"]
    assert stored["argv"] == ["train", "--run", "demo"]


def test_a_bug_of_a_reader_or_beside_a_writer_is_not_the_runs(runs_root, monkeypatch, capsys):
    run = create_run("demo", validate_recipe({}))
    monkeypatch.setattr("slimecli.commands.watch.watch", lambda *a, **k: 1 / 0)
    monkeypatch.setattr("slimecli.commands._stages.run_and_recipe", lambda *a, **k: 1 / 0)
    assert cli.run(["watch", "--run", "demo"]) == 1
    with run.lock():
        assert cli.run(["train", "--run", "demo"]) == 1
    assert not run.error_path.exists()
    assert capsys.readouterr().err.count("slime-error-") == 2


def test_a_bug_on_a_full_disk_still_shows_its_traceback(command, capsys, monkeypatch):
    def raises() -> None:
        raise ZeroDivisionError("seven")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    command(raises)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    assert cli.run(["recipes"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "the traceback: above" in err


def test_ctrl_c_is_130(command, capsys):
    def raises() -> None:
        raise KeyboardInterrupt

    command(raises)
    assert cli.run(["recipes"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_process_cleanly(tmp_path, number):
    run = create_run(str(tmp_path / "demo"), validate_recipe({}))
    with run.lock():  # a run in use is watched until it ends
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*SLIME, "watch", "--run", str(run.root)], env=ENV, **pipes)
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(0.3)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "error: interrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [*SLIME, "recipes", "--fields"], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_a_pipe_that_breaks_elsewhere_is_no_success(command, capsys):
    """One to a helper that died, say: only where nobody reads what is printed is there nothing left to do."""

    def raises() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    command(raises)
    assert cli.run(["recipes"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: BrokenPipeError: ")
    Path(re.search(r"traceback: (\S+)", err)[1]).unlink()


def test_a_full_disk_behind_stdout_is_no_bug():
    with Path("/dev/full").open("w") as full:
        command = [*SLIME, "recipes", "--fields"]
        done = subprocess.run(command, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device: standard output\n  fix: free space there\n"


def test_a_table_for_a_narrow_terminal_is_one_value_a_line(monkeypatch, capsys):
    rows = [{"name": "a" * 12, "what": "b" * 40, "more": ""}, {"name": "c", "what": "[d]", "more": 1}]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for width, drawn in ((40, False), (100, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        console.table(rows, ["name", "what", "more"])
        out = capsys.readouterr().out
        assert ("┃" in out) == drawn
    monkeypatch.setenv("COLUMNS", "40")
    console.table(rows, ["name", "what", "more"])
    assert capsys.readouterr().out.splitlines()[3:6] == ["name  c", "what  [d]", "more  1"]


@pytest.mark.parametrize("words", [["rollout"], ["train"], ["train", "--stage", "sft"], ["run", "--resume"]])
def test_a_run_that_another_works_on_is_in_use_and_lacks_nothing(runs_root, capsys, words):
    run_dir = create_run("demo", load_recipe("quickstart"))
    with run_dir.lock():
        assert cli.run([*words, "--run", "demo"]) == 1
    told = capsys.readouterr().err
    assert "run demo is in use by process" in told and "once it is mended" not in told


@pytest.mark.parametrize(
    ("option", "field"),
    [("--rollout-batch-size", "rollout.batch_size"), ("--rollout-max-context-len", "engine.max_context"), ("--x", "")],
)
def test_a_flag_of_the_upstream_is_answered_with_its_field(capsys, option, field):
    assert cli.run(["run", "--recipe", "quickstart", option, "3"]) == 2
    fix = capsys.readouterr().err.splitlines()[-1]
    assert f"--set {field}=VALUE, or see" in fix if field else "--set" not in fix
