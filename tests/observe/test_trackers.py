import importlib.util
import math
import sys
import types

import pytest

from slimecli import files
from slimecli.errors import UsageError
from slimecli.observe.trackers import TensorBoardTracker, numbers, open_trackers
from slimecli.recipe import validate_recipe
from slimecli.rundir import create_run


def test_only_finite_numbers_reach_a_tracker():
    record = {"step": 3, "train/loss": 1.5, "train/kl": math.inf, "weights/fingerprint": "abc", "n": 2}
    assert numbers(record) == {"train/loss": 1.5, "n": 2.0}


def test_no_tracker_without_being_asked(tmp_path):
    recipe = validate_recipe({})
    assert open_trackers(recipe, create_run(str(tmp_path / "r"), recipe)) == []


@pytest.mark.parametrize(
    ("package", "section"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "p"})]
)
def test_a_missing_package_is_a_usage_error_with_the_fix(tmp_path, package, section, monkeypatch):
    find = importlib.import_module
    monkeypatch.setattr(
        "slimecli.observe.trackers.importlib.import_module",
        lambda name: (_ for _ in ()).throw(ImportError(name)) if name == package else find(name),
    )
    recipe = validate_recipe({"observe": section})
    with pytest.raises(UsageError, match=package) as caught:
        open_trackers(recipe, create_run(str(tmp_path / "r"), recipe))
    assert f"pip install {package}" in caught.value.fix


@pytest.mark.parametrize(("steps", "purged"), [([], None), ([3], 4)])
def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path, monkeypatch, steps, purged):
    run, opened = create_run(str(tmp_path / "r"), validate_recipe({})), []
    fake = types.SimpleNamespace(SummaryWriter=lambda folder, purge_step: opened.append((folder, purge_step)))
    monkeypatch.setitem(sys.modules, "tensorboard", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    for step in steps:
        with files.committed_folder(run.checkpoint_dir(step)) as folder:
            (folder / "x").touch()
    TensorBoardTracker(run)
    assert opened == [(str(run.tensorboard_dir), purged)]
