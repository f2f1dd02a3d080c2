"""What a kill between two writes leaves, made by hand in copies of one finished run, and how each command goes on."""

import fcntl
import json
import shutil
import signal

import pytest

from slimecli import files
from slimecli.observe.records import read_run, run_status
from slimecli.rundir import RunDir
from tests.forked import slime, succeed
from tests.tiny_run import assert_same_run, assert_same_weights, metrics, sets

STEPS = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    words = sets(f"steps={STEPS}", "sft.steps=2", "data.count=60", "data.holdout=4", "eval.interval=1")
    succeed("run", "--recipe", "quickstart", "--run", "r", *words, folder=folder)
    return folder / "runs" / "r"


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "r", symlinks=True)
    return RunDir(tmp_path / "runs" / "r")


def set_status(run, stage, status):
    record = files.read_json(run.stage_path(stage))
    files.write_json(run.stage_path(stage), {**record, "status": status})


def test_killed_after_the_last_checkpoint_and_before_the_stage_was_noted(copy, finished, tmp_path):
    set_status(copy, "loop", "running")
    copy.stage_path("export").unlink()
    shutil.rmtree(copy.export_dir)
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert files.read_json(copy.stage_path("loop"))["result"]["performed"] == 0
    assert_same_weights(copy.export_dir, finished / "export")


def test_killed_after_the_last_sft_checkpoint_and_before_the_stage_was_noted(copy, finished, tmp_path):
    set_status(copy, "sft", "running")
    for name in ("checkpoints", "weights", "rollouts"):
        shutil.rmtree(copy.root / name)
    for stage in ("loop", "export"):
        copy.stage_path(stage).unlink()
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert files.read_json(copy.stage_path("sft"))["result"]["performed"] == 0
    assert_same_run(finished, copy.root, STEPS)


def test_killed_between_the_sft_manifest_and_its_links(copy, finished, tmp_path):
    set_status(copy, "sft", "running")
    for path in (copy.root / "checkpoints", copy.sft_dir / "checkpoints", copy.sft_dir / "weights"):
        shutil.rmtree(path)
    for name in ("model", "data"):
        (copy.sft_dir / name).unlink()
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(finished, copy.root, STEPS)


def test_train_after_a_kill_in_mid_step_writes_every_step_once(copy, finished, tmp_path):
    """Metrics and weights of step 2 are on disk, its checkpoint is not; nor may a stale step 3 survive."""
    (copy.checkpoint_dir(2) / files.DONE).unlink()
    copy.append(copy.metrics_path, {"step": 3, "train/loss": 9.0})
    with copy.metrics_path.open("a") as handle:
        handle.write('{"step": 4, "tr')
    shutil.copy(copy.samples_path(2), copy.samples_path(3))
    shutil.copytree(copy.weights_dir(2), copy.weights_dir(3))
    succeed("train", "--run", "r", folder=tmp_path)
    assert [r["step"] for r in metrics(copy.root)] == [0, 1, 2]
    assert copy.rollout_steps() == [1, 2] and not copy.weights_dir(3).exists()
    assert_same_weights(copy.weights_dir(2), finished / "weights" / "v000002")
    assert files.sha256(copy.checkpoint_dir(2)) == files.sha256(finished / "checkpoints" / "step_000002")


def test_values_that_would_change_nothing_are_refused_and_not_stored(copy, tmp_path):
    outcome = slime("run", "--resume", "--run", "r", "--set", "trainer.lr=0.5", folder=tmp_path)
    assert outcome.code == 2 and "nothing to train" in outcome.err
    assert copy.recipe().trainer.lr != 0.5
    assert run_status(copy, read_run(copy)) == "done"


def test_a_refused_second_process_leaves_the_run_of_the_first_alone(copy, tmp_path):
    with (copy.root / ".lock").open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        outcome = slime("run", "--resume", "--run", "r", "--set", "steps=5", folder=tmp_path)
    assert outcome.code == 1 and "in use" in outcome.err
    assert not copy.error_path.exists() and copy.recipe().steps == STEPS


def test_leftovers_of_a_killed_writer_are_cleared_away(copy, tmp_path):
    left = [copy.root / ".export.4194305.tmp", copy.weights_dir(1).parent / ".v000009.4194305.old"]
    for folder in left:
        folder.mkdir()
        (folder / "x").write_text("x")
    (copy.root / "stages" / ".loop.json.4194305.tmp").write_text("{")
    copy.stage_path("export").unlink()
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert not any(p.exists() for p in left) and not list(copy.root.glob("*/.*.tmp"))


def test_a_run_that_the_user_stopped_is_stopped_and_not_failed(copy, tmp_path, monkeypatch):
    from slimecli.commands.run import StopFlag

    monkeypatch.setattr(StopFlag, "__call__", lambda self: True)
    outcome = slime("run", "--resume", "--run", "r", "--set", "steps=5", folder=tmp_path)
    assert outcome.code == 130 and "--resume" in outcome.err
    assert files.read_json(copy.error_path)["exit_code"] == 130
    assert run_status(copy, read_run(copy)) == "stopped"


def test_a_stop_between_stages_is_heard(tmp_path, monkeypatch):
    from slimecli.commands.run import StopFlag

    monkeypatch.setattr(StopFlag, "__call__", lambda self: True)
    words = sets("steps=2", "data.count=60", "data.holdout=4")
    outcome = slime("run", "--recipe", "quickstart", "--run", "r", *words, folder=tmp_path)
    assert outcome.code == 130 and "after the stage data" in outcome.err
    assert not (tmp_path / "runs" / "r" / "stages" / "model.json").exists()


def test_killed_while_it_was_being_created(tmp_path):
    words = ("run", "--recipe", "quickstart", "--run", "r", "--until", "data", *sets("data.count=60"))
    assert slime(*words, folder=tmp_path, kill_at=3).code == -signal.SIGKILL
    assert not (tmp_path / "runs" / "r" / "run.json").exists() and any((tmp_path / "runs" / "r").iterdir())
    succeed(*words, folder=tmp_path)
    assert json.loads((tmp_path / "runs" / "r" / "stages" / "data.json").read_text())["status"] == "done"
