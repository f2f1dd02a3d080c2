import json

import pytest
import torch

from slimecli import files
from slimecli.cli import run
from slimecli.commands.export import export_checkpoint
from slimecli.errors import MissingStageError
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.sync.stage import stage_weights
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.models import tiny_model


@pytest.fixture
def trained(tmp_path, runs_root):
    """A run with weights and checkpoints of steps 1 and 2."""
    model = tiny_model(tmp_path / "model")
    target = create_run(
        "r", load_recipe("", ("steps=2", "sft.steps=0", "model.name='quickstart'", "model.source='init'"))
    )
    for step in (1, 2):
        pairs = ((n, t * step) for n, t in HfFolder(model).iterate())
        stage_weights(pairs, "disk", version=step, folder=target.weights_dir(step), like=model)
        with files.committed_folder(target.checkpoint_dir(step)):
            pass
    files.write_json(target.eval_path(2), {"step": 2, "sets": {"holdout": {"greedy": {"mean": 0.75}}}})
    return target, model


def test_newest_step_loads_in_transformers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, model = trained
    out = export_checkpoint(target, None)
    assert out == target.export_dir and files.is_committed(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    weights = loaded.state_dict()
    assert all(torch.equal(weights[n], (t * 2).bfloat16()) for n, t in HfFolder(model).iterate())
    assert AutoTokenizer.from_pretrained(out).chat_template
    card = (out / "README.md").read_text()
    assert "# r, step 2" in card and "| holdout | greedy | 0.7500 |" in card
    done = files.read_json(out / files.DONE)
    assert done["fingerprint"] == fingerprint(HfFolder(out).iterate()) and done["fingerprint"] in card


def test_command_line_with_step_dtype_and_folder(trained, tmp_path, capsys):
    _, model = trained
    args = ["export", "--run", "r", "--step", "1", "--out", str(tmp_path / "o"), "--dtype", "float32", "--json"]
    assert run(args) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert fingerprint(HfFolder(tmp_path / "o").iterate()) == fingerprint(HfFolder(model).iterate())


def test_missing_steps_are_named(trained, runs_root, capsys):
    assert run(["export", "--run", "r", "--step", "9"]) == 3
    assert "there are: 1, 2" in capsys.readouterr().err
    empty = create_run("empty", load_recipe("", ("sft.steps=0",)))
    with pytest.raises(MissingStageError, match="trained nothing"):
        export_checkpoint(empty, None)
    assert not empty.export_dir.exists()
