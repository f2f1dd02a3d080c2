"""`slime run` with PPO on Megatron: policy and critic over two processes and in turns, as in one process with FSDP."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.megatron  # noqa: F401 - megatron-core is imported once, and not by every fork
from tests.cluster.test_death import processes, wait_until
from tests.forked import slime, spawn_slime, succeed
from tests.tiny_run import assert_same_steps, metrics, sets, weights

STEPS = 3
PPO = (
    *(f"steps={STEPS}", "sft.steps=0", "data.count=60", "data.holdout=4", "model.dtype='float32'"),
    *("algo.name='ppo'", "algo.critic_lr=1e-2", "algo.critic_warmup=1", "algo.value_clip=5", "algo.gae_lambda=0.95"),
    *("algo.kl_coef=0.01", "algo.whiten_advantages=true", "trainer.steps_per_rollout=2", "trainer.global_batch_size=8"),
    "trainer.adam_eps=1e-3",  # rounding in a gradient near zero must not become a step
)
MEGATRON = ("trainer.backend='megatron'", "algo.critic_offload=true")
ON_RAY = ("cluster.backend='ray'", "trainer.processes=2", *MEGATRON)
TENSOR = ("--", "--tensor-model-parallel-size", "2")
CRITIC = ("train/value_loss", "train/value_clip_fraction", "train/critic_grad_norm")


def words(*extra):
    return ("run", "--recipe", "quickstart", "--run", "r", *sets(*PPO, *extra))


def assert_same_curve(a, b):
    """Up to the order of float32 additions: the same answers, and numbers that differ by rounding."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one["rollout/reward"] == two["rollout/reward"], one["step"]
        for name in ("train/loss", "train/entropy", "train/kl", *CRITIC[:2]):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=2e-6), (one["step"], name)
        for name in ("train/grad_norm", CRITIC[2]):
            assert one[name] == pytest.approx(two[name], rel=1e-3), (one["step"], name)
    left, right = (weights(r / f"weights/v{STEPS:06d}") for r in (a, b))
    start = weights(b / "weights" / "v000001")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert max(float((right[n] - start[n]).abs().max()) for n in start) > 1e-3, "nothing was learnt"


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """The same recipe with the other trainer, in one process."""
    folder = tmp_path_factory.mktemp("fsdp")
    succeed(*words(), folder=folder)
    return folder / "runs" / "r"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Megatron in one process, and how many durable writes that takes."""
    folder = tmp_path_factory.mktemp("alone")
    return folder / "runs" / "r", succeed(*words(*MEGATRON), "--until", "loop", folder=folder)


@pytest.fixture(scope="module")
def tensor(tmp_path_factory):
    """Tensor parallelism over two Ray actors, uninterrupted."""
    folder = tmp_path_factory.mktemp("tensor")
    succeed(*words(*ON_RAY), *TENSOR, folder=folder, run=spawn_slime)
    return folder / "runs" / "r"


def test_one_process_has_the_curve_of_fsdp(fsdp, alone):
    assert_same_curve(alone[0], fsdp)
    seen = metrics(alone[0])
    assert [line["train/lr"] > 0 for line in seen] == [False, True, True]
    assert seen[2]["train/value_loss"] != seen[0]["train/value_loss"] and seen[1]["train/critic_grad_norm"] > 0


def test_killed_at_a_durable_write_and_resumed_equals_straight(alone, tmp_path):
    expected, outcome = alone
    kill_at = outcome.fsyncs * 2 // 3
    assert slime(*words(*MEGATRON), "--until", "loop", folder=tmp_path, kill_at=kill_at).code == -9
    assert 0 < len(metrics(tmp_path / "runs" / "r")) < STEPS
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_steps(expected, tmp_path / "runs" / "r", STEPS)


@pytest.mark.ray
def test_tensor_parallel_has_the_curve_of_fsdp(fsdp, tensor):
    assert_same_curve(tensor, fsdp)


@pytest.mark.ray
@pytest.mark.timeout(700)
def test_a_rank_killed_in_mid_run_is_made_up_for_byte_for_byte(tensor, tmp_path):
    variables = {**os.environ, "SLIME_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", "from slimecli.cli import main; main()", *words(*ON_RAY), *TENSOR]
    with (tmp_path / "told").open("wb") as told:
        run = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=told)
    root, mark = tmp_path / "runs" / "r", f"SLIME_RUNS={tmp_path / 'runs'}\0"
    ranks: list[int] = []

    def learns() -> bool:
        ranks[:] = ranks or [number for number, line in processes(mark).items() if "TrainerHost" in line]
        return (root / "metrics.jsonl").exists() and len(metrics(root)) > 0

    wait_until(learns, 120)
    os.kill(ranks[-1], signal.SIGKILL)
    assert run.wait(timeout=60) == 1, (tmp_path / "told").read_text()
    assert 0 < len(metrics(root)) < STEPS
    wait_until(lambda: not processes(mark), 20)
    succeed("run", "--resume", "--run", "r", folder=tmp_path, run=spawn_slime)
    assert_same_steps(tensor, root, STEPS)
