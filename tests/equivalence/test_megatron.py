"""`slime run` with the Megatron trainer: the curve of FSDP at any layout, and every resume as good as none."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tests.megatron  # noqa: F401 - megatron-core is imported once, and not by every fork
from tests.cluster.test_death import processes, wait_until
from tests.forked import slime, spawn_slime, succeed
from tests.tiny_run import assert_same_steps, metrics, sets, weights

STEPS = 4
SMALL = (
    f"steps={STEPS}",
    "sft.steps=4",
    "data.count=60",
    "data.holdout=4",
    "model.dtype='float32'",
    "trainer.adam_eps=1e-3",  # rounding in a gradient near zero must not become a step
)
MEGATRON = ("trainer.backend='megatron'",)
ON_RAY = ("cluster.backend='ray'", "trainer.processes=2", *MEGATRON)
TENSOR = ("--", "--tensor-model-parallel-size", "2")
PIPELINE = ("--", "--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "1")


def words(name, *extra):
    return ("run", "--recipe", "quickstart", "--run", name, *sets(*SMALL, *extra))


def assert_same_curve(a, b):
    """Up to the order of float32 additions: the same answers, and numbers that differ by rounding."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one["rollout/reward"] == two["rollout/reward"] if one["step"] else True
        for name in ("train/loss", "train/entropy", "train/logprob_gap_max"):
            assert one.get(name, 0) == pytest.approx(two.get(name, 0), abs=2e-6), (one["step"], name)
        assert one.get("train/grad_norm", 0) == pytest.approx(two.get("train/grad_norm", 0), rel=1e-4), one["step"]
    left, right = (weights(r / f"weights/v{STEPS:06d}") for r in (a, b))
    start = weights(b / "sft" / "weights" / "v000004")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert max(float((right[n] - start[n]).abs().max()) for n in start) > 1e-3, "nothing was learnt"


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """The same recipe with the other trainer, in one process."""
    folder = tmp_path_factory.mktemp("fsdp")
    succeed(*words("r"), folder=folder)
    return folder / "runs" / "r"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Megatron in one process, and how many durable writes that takes."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = succeed(*words("r", *MEGATRON), "--until", "loop", folder=folder)
    return folder / "runs" / "r", outcome


def test_one_process_has_the_curve_of_fsdp_and_a_clean_screen(fsdp, alone):
    assert_same_curve(alone[0], fsdp)
    assert "Warning" not in alone[1].err
    told = alone[1].err
    assert "megatron: calculate_per_token_loss = true  (always: losses carry global denominators" in told
    assert told.count("megatron: layout") == 1, "once, though SFT and the loop both train"


@pytest.mark.parametrize("point", range(4))
def test_killed_at_a_durable_write_and_resumed_equals_straight(alone, tmp_path, point):
    expected, outcome = alone
    kill_at = 8 + (outcome.fsyncs - 8) * (2 * point + 1) // 8
    assert slime(*words("r", *MEGATRON), "--until", "loop", folder=tmp_path, kill_at=kill_at).code == -9
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_steps(expected, tmp_path / "runs" / "r", STEPS)


@pytest.fixture(scope="module")
def tensor(tmp_path_factory):
    """Tensor parallelism over two Ray actors, uninterrupted."""
    folder = tmp_path_factory.mktemp("tensor")
    outcome = succeed(*words("r", *ON_RAY), *TENSOR, folder=folder, run=spawn_slime)
    assert "Warning" not in outcome.err, outcome.err
    return folder / "runs" / "r"


@pytest.mark.ray
def test_tensor_parallel_has_the_curve_of_fsdp(fsdp, tensor):
    assert_same_curve(tensor, fsdp)


@pytest.mark.ray
def test_pipeline_parallel_has_the_curve_of_fsdp(fsdp, tmp_path):
    succeed(*words("r", *ON_RAY), *PIPELINE, folder=tmp_path, run=spawn_slime)
    assert_same_curve(tmp_path / "runs" / "r", fsdp)


@pytest.mark.ray
@pytest.mark.timeout(700)
def test_a_rank_killed_in_mid_step_is_told_and_made_up_for_at_the_same_and_at_another_layout(tensor, tmp_path):
    variables = {**os.environ, "SLIME_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(Path(__file__).parents[2])}
    code = "from slimecli.cli import main; main()"
    run = subprocess.Popen(
        [sys.executable, "-c", code, *words("r", *ON_RAY), *TENSOR],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.DEVNULL,  # the raylet prints there
        stderr=subprocess.PIPE,
    )
    root = tmp_path / "runs" / "r"
    wait_until(lambda: (root / "metrics.jsonl").exists() and len(metrics(root)) > 2, 200)
    mark = f"SLIME_RUNS={tmp_path / 'runs'}\0"
    victim = [number for number, line in processes(mark).items() if "TrainerHost" in line][-1]
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    told = run.communicate(timeout=60)[1].decode()
    assert time.monotonic() - begin < 20, "the others were left waiting"
    assert run.returncode == 1 and "died while we waited for the trainer" in told, told
    assert "--resume" in told and "Traceback" not in told and "closed by peer" not in told
    assert len(metrics(root)) < STEPS + 1
    wait_until(lambda: not processes(mark), 20)

    other = tmp_path / "runs" / "other"
    shutil.copytree(root, other, symlinks=True)
    succeed("run", "--resume", "--run", "r", folder=tmp_path, run=spawn_slime)
    assert_same_steps(tensor, root, STEPS)
    change = ("--set", "megatron={}", *PIPELINE)
    outcome = succeed("run", "--resume", "--run", "other", *change, folder=tmp_path, run=spawn_slime)
    assert "rounding" in outcome.err, outcome.err
    assert_same_curve(other, tensor)
