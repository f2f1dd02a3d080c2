import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli import cli, files
from slimecli.errors import DataError, MissingStageError, SlimeError, UsageError
from slimecli.recipe import load_recipe, recipe_path, validate_recipe
from slimecli.rundir import RunDir, create_run, list_runs, open_run
from slimecli.samples import decode_samples, encode_samples
from slimecli.types import Sample, SampleStatus

RECIPE = validate_recipe({"title": "t", "steps": 3})


@pytest.fixture
def run(runs_root):
    return create_run("demo", RECIPE, "steps = 3\n")


def groups():
    return [
        [
            Sample(group_index=g, index=2 * g + i, tokens=[1, 2, 3], response_length=1, response="ü\n", reward=float(i))
            for i in range(2)
        ]
        for g in range(3)
    ]


def commit(run, step):
    with files.committed_folder(run.checkpoint_dir(step)) as folder:
        (folder / "w").write_text(str(step))


def test_a_run_is_found_by_name_and_by_path(run, runs_root):
    assert run.root == runs_root / "demo"
    assert open_run("demo").recipe() == RECIPE
    assert open_run(str(run.root)).root == run.root
    assert [r.name for r in list_runs()] == ["demo"]
    with pytest.raises(UsageError, match="no run at"):
        open_run("other")


def test_a_name_is_not_taken_twice(run):
    (run.root / "metrics.jsonl").write_text("kept")
    with pytest.raises(UsageError, match="exists already") as caught:
        create_run("demo", RECIPE)
    assert "--resume" in caught.value.fix
    assert (run.root / "metrics.jsonl").exists()
    create_run("demo", RECIPE, overwrite=True)
    assert not (run.root / "metrics.jsonl").exists()


def test_a_folder_that_is_no_run_is_never_overwritten(runs_root):
    (runs_root / "photos").mkdir(parents=True)
    (runs_root / "photos" / "me.jpg").write_text("x")
    with pytest.raises(UsageError, match="not a run directory"):
        create_run("photos", RECIPE, overwrite=True)
    assert (runs_root / "photos" / "me.jpg").exists()


def test_one_writer_only(run):
    code = f"from slimecli.rundir import open_run\nwith open_run({str(run.root)!r}).lock(): print('got it')"
    with run.lock():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "is in use by process" in done.stderr
        assert done.returncode
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "got it\n"


def test_samples_round_trip_byte_for_byte(run):
    made = groups()
    data = encode_samples(made)
    assert decode_samples(data, "x") == made
    assert encode_samples(decode_samples(data, "x")) == data
    run.write_samples(2, made)
    assert run.read_samples(2) == made
    assert run.rollout_steps() == [2]
    with pytest.raises(MissingStageError):
        run.read_samples(1)
    with pytest.raises(DataError, match="damaged"):
        decode_samples(data[:-9] + b"123456789", "x")


def test_only_complete_checkpoints_count(run):
    for step in (2, 4, 6):
        commit(run, step)
    (run.checkpoint_dir(8)).mkdir()
    (run.checkpoint_dir(6) / "w").write_text("longer than before")
    assert run.checkpoints() == [2, 4]
    assert run.last_checkpoint() == 4
    assert list(run.damaged_checkpoints()) == [6] and "w has 18 bytes" in run.damaged_checkpoints()[6]
    assert run.prune_checkpoints(keep=1) == [2]
    assert run.checkpoints() == [4]


def test_pruning_takes_weights_that_no_checkpoint_holds(run):
    for step in (2, 4, 6):
        commit(run, step)
        run.weights_dir(step).mkdir(parents=True)
    shutil.rmtree(run.checkpoint_dir(4))
    assert run.prune_checkpoints(keep=0) == [] and run.weights_dir(4).exists()
    assert run.prune_checkpoints(keep=1) == [2]
    assert [p.name for p in (run.root / "weights").iterdir()] == ["v000006"]


def test_records_ignore_a_torn_last_line_and_rewind(run):
    for step in range(4):
        run.append(run.metrics_path, {"step": step, "x": step * 0.5})
    with run.metrics_path.open("a") as handle:
        handle.write('{"step": 4, "x"')
    assert [r["step"] for r in run.read_records(run.metrics_path)] == [0, 1, 2, 3]
    run.write_samples(1, groups())
    run.write_samples(3, groups())
    run.weights_dir(2).mkdir(parents=True)
    run.weights_dir(3).mkdir()
    run.rewind(2, samples_until=3)
    assert run.rollout_steps() == [1, 3]
    run.rewind(2)
    assert run.weights_dir(2).exists() and not run.weights_dir(3).exists()
    assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == [0, 1, 2]
    assert run.rollout_steps() == [1]


def test_a_changed_recipe_is_kept_beside_the_first_with_its_reason(run):
    changed = validate_recipe({"title": "t", "steps": 9})
    run.change_recipe(changed, why="--set steps=9")
    assert run.recipe() == changed
    assert files.read_json(run.root / "recipe.json")["steps"] == 3
    assert files.read_json(run.manifest_path)["recipe_changes"] == [{"file": "recipe.2.json", "why": "--set steps=9"}]


def test_attempts_are_numbered_and_latest_points_at_the_newest(run):
    first, second = run.new_attempt(), run.new_attempt()
    assert (first.name, second.name) == ("attempt_001", "attempt_002")
    assert run.log_path("trainer").parent.resolve() == second.resolve()


def test_only_what_the_dead_left_half_written_is_removed(run):
    mine, dead, alive = (run.root / f".x.{pid}.tmp" for pid in (os.getpid(), 2**22 + 1, os.getppid()))
    for path in (mine, dead, alive):
        path.touch()
    run.new_attempt()
    assert [p.exists() for p in (mine, dead, alive)] == [False, False, True]


def test_a_lock_that_is_held_elsewhere_names_its_owner(run):
    with run.lock():
        with pytest.raises(SlimeError, match="process"), run.lock():
            pass
        assert run.is_locked()
    assert not run.is_locked()


def test_status_of_a_finished_sample_survives(run):
    sample = Sample(tokens=[1, 2], response_length=1, reward=0.0, status=SampleStatus.TRUNCATED)
    run.write_samples(1, [[sample]])
    assert run.read_samples(1)[0][0].status is SampleStatus.TRUNCATED


def test_a_run_that_cannot_be_written_is_no_bug(tmp_path, monkeypatch):
    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(SlimeError, match="no permission to write"), RunDir(tmp_path).lock():
        pass


def test_a_damaged_recipe_can_be_made_again_as_told(run, monkeypatch, capsys):
    argv = ["slime", "run", "--recipe", "quickstart", "--set", "steps=7", "--set=title='my run'"]
    argv += ["--", "--context-parallel-size", "2"]
    files.write_json(run.manifest_path, {"argv": argv})
    files.write_text(run.root / "recipe.toml", recipe_path("quickstart").read_text())
    for damage in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        damage(run.root / "recipe.json")
        with pytest.raises(DataError, match="make it again: slime recipes show") as caught:
            run.recipe()
        command, target = caught.value.fix.removeprefix("make it again: slime ").split(" > ")
        assert cli.run(shlex.split(command)) == 0
        Path(target).write_text(capsys.readouterr().out)
        assert run.recipe() == load_recipe(
            "quickstart", ("steps=7", "title='my run'", "megatron.context-parallel-size=2")
        )


def test_a_damaged_change_of_a_recipe_names_what_it_changed(run):
    first = run.recipe()
    run.change_recipe(first.model_copy(update={"steps": 9}), why="--set steps=9")
    (run.root / "recipe.2.json").write_text("")
    with pytest.raises(DataError, match="remove it to go on with recipe.json; what it changed: --set steps=9"):
        run.recipe()
    (run.root / "recipe.2.json").unlink()
    assert run.recipe() == first


def test_a_damaged_recipe_of_the_sft_stage_is_made_anew(run):
    inner = create_run(str(run.sft_dir), run.recipe())
    (inner.root / "recipe.json").write_text("{")
    with pytest.raises(DataError, match=f"remove {inner.root}: the stage is then done anew"):
        inner.recipe()


def test_samples_whose_end_is_missing_are_not_read_as_fewer(run):
    data = encode_samples([[Sample(index=i, response=str(i) * 50)] for i in range(200)])
    for damaged, told in (
        (data[:-1], "its end is missing"),
        (data[:50], "damaged"),
        (b"", "missing"),
        (data + b"x", "more after"),
    ):
        with pytest.raises(DataError, match=told):
            decode_samples(damaged, "x")


def test_line_separators_of_unicode_end_no_sample(run):
    made = [[Sample(index=0, response="a\u2028b\x85c\x1cd\r\ne")]]
    assert decode_samples(encode_samples(made), "x") == made


def test_a_name_is_quoted_for_the_shell(tmp_path):
    run = create_run(str(tmp_path / "my run"), validate_recipe({}))
    with pytest.raises(MissingStageError, match=f"slime rollout --run '{run.root}'"):
        run.read_samples(1)


def test_a_name_too_long_for_the_file_system_is_a_usage_error():
    for name in ("x" * 300, "a/" + "ü" * 200):
        with pytest.raises(UsageError, match="too long"):
            create_run(name, validate_recipe({}))
