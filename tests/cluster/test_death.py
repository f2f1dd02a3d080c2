"""A worker that dies in mid-run: a named error, nothing left behind, and a resume that makes up for it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import spawn_slime, succeed
from tests.tiny_run import assert_same_run, even_share, metrics, sets

STEPS = 24
SMALL = (f"steps={STEPS}", "sft.steps=2", "data.count=60", "data.holdout=4", "checkpoint.interval=2", "trainer.lr=1e-5")
FEW = 10
TWO_RANKS = (f"steps={FEW}", "trainer.processes=2", "engine.replicas=1")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """An undisturbed run of two trainer ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    words = sets(*SMALL, "cluster.backend='ray'", *TWO_RANKS)
    succeed("run", "--recipe", "quickstart", "--run", "r", *words, folder=folder, run=spawn_slime)
    return folder / "runs" / "r"


async def patient(args, sample, **kwargs):
    """As the other reward, and slow while the file `patient` lies beside the runs: the run outlasts a restart."""
    if (Path(os.environ["SLIME_RUNS"]).parent / "patient").exists():
        await asyncio.sleep(1.5)
    return await even_share(args, sample)


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


def start(folder, name, *extra, within_s=200):
    """`slime run` on a local Ray, with two engines, until it has done a few steps; (process, run directory)."""
    wanted = (*SMALL, "cluster.backend='ray'", "engine.replicas=2", *extra)
    words = ("run", "--recipe", "quickstart", "--run", name, *sets(*wanted))
    variables = {**os.environ, "SLIME_RUNS": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(
        [sys.executable, "-c", "from slimecli.cli import main; main()", *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,  # the raylet prints there
        stderr=subprocess.PIPE,
    )
    root = folder / "runs" / name
    written = root / "metrics.jsonl"
    wait_until(lambda: run.poll() is not None or (written.exists() and len(metrics(root)) > 2), within_s)
    assert run.poll() is None, run.communicate()[1].decode()
    return run, root


def engines_of(folder, name="EngineHost"):
    """Process numbers of the engines (or what else is named so) of runs under a folder."""
    mark = f"SLIME_RUNS={folder / 'runs'}\0"
    return [number for number, line in processes(mark).items() if name in line]


@pytest.mark.ray
def test_an_engine_that_is_killed_is_replaced_and_the_run_equals_an_undisturbed_one(tmp_path):
    (tmp_path / "patient").touch()
    slow = "reward.path='tests.cluster.test_death:patient'"
    run, root = start(tmp_path, "r", "engine.health_interval_s=0.5", "engine.router='builtin'", slow)
    os.kill(engines_of(tmp_path)[0], signal.SIGKILL)
    os.kill(engines_of(tmp_path, "slimecli.engines.router")[0], signal.SIGKILL)
    told = run.communicate(timeout=180)[1].decode()
    assert run.returncode == 0, told
    assert re.search(r"engine \d at http://\S+ died \(.*\): restarted in [\d.]+ s at \S+, holds version \d+", told), (
        told
    )
    assert re.search(r"the router at http://\S+ died \(exit code -9\): restarted", told), told
    lost = [r for r in map(json.loads, (root / "perf.jsonl").read_text().splitlines()) if "engine/lost" in r]
    assert len(lost) == 1 and lost[0]["engine/lost"] == 1
    assert "restarted in" in (root / "logs" / "latest" / "engines.log").read_text()
    (tmp_path / "patient").unlink()
    succeed("run", "--recipe", "quickstart", "--run", "straight", *sets(*SMALL, slow), folder=tmp_path)
    assert_same_run(tmp_path / "runs" / "straight", root, STEPS)


@pytest.mark.ray
def test_stop_ends_the_run_with_the_engines_name_and_the_resumed_run_equals_a_straight_one(tmp_path):
    run, root = start(tmp_path, "r", "engine.on_failure='stop'")
    os.kill(engines_of(tmp_path)[0], signal.SIGKILL)
    told = run.communicate(timeout=60)[1].decode()
    assert run.returncode == 1, told
    assert "http://127.0.0.1:" in told and "--resume" in told and "Traceback" not in told
    assert len(metrics(root)) < STEPS
    wait_until(lambda: not processes(f"SLIME_RUNS={tmp_path / 'runs'}\0"), 20)

    alone = ("--set", "cluster.backend='local'", "--set", "engine.replicas=1")
    succeed("run", "--resume", "--run", "r", *alone, folder=tmp_path)
    succeed("run", "--recipe", "quickstart", "--run", "straight", *sets(*SMALL), folder=tmp_path)
    assert_same_run(tmp_path / "runs" / "straight", root, STEPS)


def rank_of(number):
    """Which trainer rank a process is: each writes into a log of its own."""
    for link in Path(f"/proc/{number}/fd").iterdir():
        if found := re.search(r"trainer_(\d)\.log$", str(link.readlink())):
            return int(found[1])
    raise AssertionError(f"process {number} has no trainer's log open")


@pytest.mark.ray
@pytest.mark.timeout(1500)  # three starts of Ray, on a machine that may be busy
def test_a_trainer_rank_that_is_killed_is_named_and_the_resumed_run_equals_a_straight_one(two_ranks, tmp_path):
    """The one that is left waits in a collective, and would say that its peer hung up."""
    run, root = start(tmp_path, "r", *TWO_RANKS)
    ranks = {rank_of(number): number for number in engines_of(tmp_path, "TrainerHost")}
    assert ranks.keys() == {0, 1}
    killed = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    told = run.communicate(timeout=60)[1].decode()
    assert time.monotonic() - killed < 30, "within seconds, Ray's own end included"
    assert run.returncode == 1 and "Traceback" not in told, told
    assert re.search(r"error: trainer rank 1 died while we waited for the trainer to \w+", told), told
    assert "continue with `slime run --resume`" in told
    assert "trainer rank 1 died" in json.loads((root / "error.json").read_text())["what"]
    assert len(metrics(root)) < FEW
    wait_until(lambda: not processes(f"SLIME_RUNS={tmp_path / 'runs'}\0"), 20)
    succeed("run", "--resume", "--run", "r", folder=tmp_path, run=spawn_slime)
    assert_same_run(two_ranks, root, FEW)
