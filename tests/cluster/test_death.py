"""A worker that dies in mid-run: a named error, nothing left behind, and a resume that makes up for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import succeed
from tests.tiny_run import assert_same_run, metrics, sets

STEPS = 24
SMALL = (f"steps={STEPS}", "sft.steps=2", "data.count=60", "data.holdout=4", "checkpoint.interval=2", "trainer.lr=1e-5")


def processes(mark):
    """Process number -> command line of everything whose environment holds `mark`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return {number: line for number, line in found.items() if line}


def wait_until(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.ray
def test_an_engine_that_is_killed_is_named_and_the_resumed_run_equals_a_straight_one(tmp_path):
    words = ("run", "--recipe", "quickstart", "--run", "r", *sets(*SMALL, "cluster.backend='ray'"))
    variables = {**os.environ, "SLIME_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(Path(__file__).parents[2])}
    code = "from slimecli.cli import main; main()"
    run = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.DEVNULL,  # the raylet prints there
        stderr=subprocess.PIPE,
    )
    root = tmp_path / "runs" / "r"
    wait_until(lambda: (root / "metrics.jsonl").exists() and len(metrics(root)) > 2, 90)
    mark = f"SLIME_RUNS={tmp_path / 'runs'}\0"
    engine = next(number for number, line in processes(mark).items() if "EngineHost" in line)
    os.kill(engine, signal.SIGKILL)
    told = run.communicate(timeout=60)[1].decode()
    assert run.returncode == 1, told
    assert "http://127.0.0.1:" in told and "--resume" in told and "Traceback" not in told
    assert len(metrics(root)) < STEPS
    wait_until(lambda: not processes(mark), 20)

    succeed("run", "--resume", "--run", "r", "--set", "cluster.backend='local'", folder=tmp_path)
    succeed("run", "--recipe", "quickstart", "--run", "straight", *sets(*SMALL), folder=tmp_path)
    assert_same_run(tmp_path / "runs" / "straight", root, STEPS)
