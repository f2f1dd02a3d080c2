"""`slime train` on two ranks: rank 0 speaks and writes, every failure is told once, by rank 0, within seconds."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tests.megatron  # noqa: F401 - megatron-core is imported once, and not by every rank
from tests.cluster.ranks import on_ranks
from tests.forked import succeed
from tests.tiny_run import metrics, sets, weights

ROOT = Path(__file__).parents[2]
SMALL = ("steps=2", "sft.steps=2", "data.count=40", "data.holdout=4", "trainer.adam_eps=1e-3", "model.dtype='float32'")
FSDP = ("--set", "trainer.processes=2")
MEGATRON = (*FSDP, "--set", "trainer.backend=megatron")
TENSOR = ("--", "--tensor-model-parallel-size", "2")
PIPELINE = ("--", "--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "1")
BACKENDS = pytest.mark.parametrize(
    "words", [FSDP, (*MEGATRON, *TENSOR), (*MEGATRON, *PIPELINE)], ids=["fsdp", "megatron-tp2", "megatron-pp2"]
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run whose SFT is done, with samples for step 1; and the same after step 1 in one process."""
    folder = tmp_path_factory.mktemp("prepared")
    words = ("--recipe", "quickstart", "--run", "r", *sets(*SMALL))
    succeed("run", *words, "--until", "sft", folder=folder)
    succeed("rollout", "--run", "r", folder=folder)
    alone = tmp_path_factory.mktemp("alone")
    shutil.copytree(folder / "runs", alone / "runs", symlinks=True)
    succeed("train", "--run", "r", folder=alone)
    return folder, alone / "runs" / "r"


@pytest.fixture
def folder(prepared, tmp_path):
    shutil.copytree(prepared[0] / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path


@pytest.mark.parametrize("words", [FSDP, (*MEGATRON, *TENSOR)], ids=["fsdp", "megatron-tp2"])
def test_two_ranks_take_the_step_of_one(prepared, folder, words):
    first, second = on_ranks("train", "--run", "r", *words, folder=folder)
    assert (first.code, second.code) == (0, 0), first.err
    told = first.err.splitlines()
    forced = [line for line in told if line.startswith("megatron: ")]
    assert told[: len(forced)] == forced and len(set(forced)) == len(forced) and bool(forced) == (words != FSDP)
    assert told[len(forced)].startswith("step 1: loss") and (first.out, second.out, second.err) == ("", "", "")
    run, alone = folder / "runs" / "r", prepared[1]
    assert (run / "checkpoints" / "step_000001" / "DONE.json").is_file()
    ours, expected = (weights(r / "weights" / "v000001") for r in (run, alone))
    moved = weights(run / "sft" / "weights" / "v000002")
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert any(not torch.equal(ours[name], moved[name]) for name in ours)
    assert metrics(run)[0]["train/loss"] == pytest.approx(metrics(alone)[0]["train/loss"], abs=1e-6)


def test_nothing_to_train_lets_the_other_rank_go(folder):
    first, second = on_ranks("train", "--run", "r", "--stage", "sft", folder=folder)
    assert (first.code, second.code) == (0, 0), first.err
    assert "sft: skipped" in first.err and second.err == ""


def test_a_wrong_command_line_is_told_once(folder):
    first, second = on_ranks("train", "--run", "nowhere", folder=folder)
    assert first.code == 2 and "no run at" in first.err
    assert second.code == -signal.SIGTERM and second.err == "" and second.seconds < first.seconds + 2


def test_a_number_of_ranks_that_the_recipe_does_not_say_is_told(folder):
    first, _ = on_ranks("train", "--run", "r", folder=folder)
    assert first.code == 2 and "trainer.processes = 1, but this command runs in 2" in first.err


def on_rank_1(fails):
    """Inside a step of either trainer, where rank 0 waits for this rank."""
    from slimecli.trainers import _parallel
    from slimecli.trainers.megatron import trainer

    def prepare(rank):
        if rank == 1:
            _parallel.reduce_metrics = trainer.weighted_loss = fails

    return prepare


def boom(*args, **kwargs):
    raise ValueError("boom")


def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


@BACKENDS
def test_what_another_rank_fails_with_is_raised_by_rank_0(folder, words):
    first, second = on_ranks("train", "--run", "r", *words, folder=folder, prepare=on_rank_1(boom))
    assert first.code == 1 and "error: trainer process 1: ValueError: boom" in first.err, first.err
    assert "trainer_1.log" in first.err and second.err == ""
    log = (folder / "runs" / "r" / "logs" / "latest" / "trainer_1.log").read_text()
    assert "Traceback" in log and "boom" in log


@BACKENDS
def test_a_rank_that_is_killed_ends_the_others_at_once(folder, words):
    first, second = on_ranks("train", "--run", "r", *words, folder=folder, prepare=on_rank_1(killed))
    assert second.code == -signal.SIGKILL
    assert first.code == 1 and "Traceback" not in first.err, first.err
    assert "a trainer process died while the trainer was busy with `step`" in first.err
    assert first.seconds < second.seconds + 5
    succeed("train", "--run", "r", folder=folder)


def test_torchrun_itself(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "slimecli"]
    variables = {**os.environ, "SLIME_RUNS": str(folder / "runs"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["train", "-r", "r", *MEGATRON, "--json", "--", "--pipeline-model-parallel-size", "2"]
    words += ["--decoder-last-pipeline-num-layers", "1"]
    begin = time.monotonic()
    done = subprocess.run([*torchrun, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('"step": 1') == 2, "one result, which holds the step twice"
    assert "Warning" not in done.stderr
    wrong = subprocess.run(
        [*torchrun, *words[:-2], "--tensor-model-paralel-size", "2"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert wrong.returncode != 0 and wrong.stderr.count("did you mean 'tensor-model-parallel-size'?") == 1
    assert time.monotonic() - begin < 100
