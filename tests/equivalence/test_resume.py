"""kill -9 at any durable write, then --resume: the result is the uninterrupted run's, byte for byte."""

import json

import pytest

from tests.forked import slime, succeed
from tests.tiny_run import assert_same_run, metrics, sets

STEPS = 4
ARGUMENTS = ["--recipe", "quickstart", *sets(f"steps={STEPS}", "checkpoint.interval=2", "eval.interval=2")]
KILL_POINTS = 10


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    outcome = succeed("run", "--run", "r", *ARGUMENTS, folder=folder)
    return folder / "runs" / "r", outcome.fsyncs


@pytest.mark.parametrize("point", range(KILL_POINTS))
def test_killed_and_resumed_equals_straight(straight, tmp_path, point):
    expected, writes = straight
    kill_at = 8 + (writes - 8) * point // KILL_POINTS  # the first writes create the run itself
    killed = slime("run", "--run", "r", *ARGUMENTS, folder=tmp_path, kill_at=kill_at)
    assert killed.code == -9
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(expected, tmp_path / "runs" / "r", STEPS)


def test_killed_twice(straight, tmp_path):
    expected, writes = straight
    assert slime("run", "--run", "r", *ARGUMENTS, folder=tmp_path, kill_at=writes * 3 // 4).code == -9
    assert slime("run", "--resume", "--run", "r", folder=tmp_path, kill_at=9).code == -9
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(expected, tmp_path / "runs" / "r", STEPS)


def test_a_complete_run_says_so_and_is_no_success(straight):
    expected, _ = straight
    outcome = slime("run", "--resume", "--run", "r", folder=expected.parent.parent)
    assert outcome.code == 2 and "complete (4 of 4 steps)" in outcome.err


def test_more_steps_continue_and_equal_a_longer_run(straight, tmp_path):
    shorter = [*ARGUMENTS, "--set", "trainer.lr_schedule=constant"]
    succeed("run", "--run", "r", *shorter, folder=tmp_path)
    succeed("run", "--resume", "--run", "r", "--set", "steps=6", folder=tmp_path)
    succeed("run", "--run", "long", *shorter, "--set", "steps=6", folder=tmp_path)
    runs = tmp_path / "runs"
    left = [json.loads(x) for x in (runs / "r" / "metrics.jsonl").read_text().splitlines()]
    right = [json.loads(x) for x in (runs / "long" / "metrics.jsonl").read_text().splitlines()]
    train = [[{k: v for k, v in r.items() if not k.startswith("eval/")} for r in rs] for rs in (left, right)]
    assert train[0] == train[1]


def test_a_damaged_checkpoint_is_not_chosen_and_told(straight, tmp_path):
    expected, writes = straight
    assert slime("run", "--run", "r", *ARGUMENTS, folder=tmp_path, kill_at=writes - 6).code == -9
    run = tmp_path / "runs" / "r"
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    victim = next((newest / "trainer").iterdir())
    victim.write_bytes(victim.read_bytes()[:-1])
    told = " ".join(succeed("run", "--resume", "--run", "r", folder=tmp_path).err.split())
    step = int(newest.name[-6:])
    assert f"warning: the checkpoint of step {step} is damaged (trainer/{victim.name} has" in told, told
    assert f"going on from step {step - 2}" in told
    assert_same_run(expected, run, STEPS)


def test_the_buffer_of_a_dynamic_filter_survives_a_resume(tmp_path):
    """Over-sampling leaves prompts over at every step; weights move enough that an answer of old ones breaks a gate."""
    words = ("rollout.dynamic_filter='zero-variance'", "rollout.over_sampling_batch_size=7", "trainer.lr=0.01")
    small = ("steps=3", "sft.steps=2", "data.count=60", "data.holdout=4")
    arguments = ["--until", "loop", "--recipe", "quickstart", *sets(*words, *small)]
    whole = succeed("run", "--run", "whole", *arguments, folder=tmp_path)
    assert slime("run", "--run", "r", *arguments, folder=tmp_path, kill_at=whole.fsyncs * 3 // 4).code == -9
    runs = tmp_path / "runs"
    assert 0 < len(metrics(runs / "r")) < 3
    state = json.loads(sorted((runs / "r" / "checkpoints").glob("step_*/data_state.json"))[-1].read_text())
    assert state["source"]["buffer"], "nothing was left over: this tests nothing"
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(runs / "whole", runs / "r", 3)
