import json
import shutil

import pytest
import torch

from slimecli import files
from slimecli.cli import run
from slimecli.commands.export import command_line, export_checkpoint
from slimecli.errors import MissingStageError, UsageError
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.sync.stage import stage_weights
from slimecli.trainers._checkpoint import save_state
from slimecli.weights.card import code_version
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from slimecli.weights.quant import open_weights
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
    assert "# r, step 2" in card and "| holdout | greedy |  | 0.7500 |" in card
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
    begun = create_run("begun", load_recipe("", ("sft.steps=3",)))
    with pytest.raises(MissingStageError, match="no weights of step 7; there are: none"):
        export_checkpoint(begun, 7)
    with pytest.raises(MissingStageError, match="trained nothing"):
        export_checkpoint(begun, None)


def test_the_card_tells_where_the_model_comes_from(trained):
    target, _ = trained
    files.write_json(target.eval_path(0), {"step": 0, "sets": {"holdout": {"greedy": {"mean": 0.25}}}})
    for step, reward in ((1, 0.1), (2, 0.6)):
        target.append(target.metrics_path, {"step": step, "rollout/reward": reward})
    manifest = files.read_json(target.manifest_path)
    changed = {
        "argv": ["/usr/bin/slime", "run", "--recipe", "my recipe.toml"],
        "recipe_changes": [{"why": "--set steps=2"}],
    }
    files.write_json(target.manifest_path, {**manifest, **changed})
    target.data_dir.mkdir()
    (target.data_dir / "train.jsonl").write_text("{}\n" * 7)
    target.model_dir.mkdir(parents=True)
    files.write_json(target.model_dir / files.DONE, {"commit": "0123abcd"})
    card = (export_checkpoint(target, None, quantize="fp8") / "README.md").read_text()
    for said in (
        "library_name: transformers",
        "| base model | quickstart @ 0123abcd (init) |",
        "| steps | 2 of 2, after 0 SFT steps |",
        ", 7 prompts |",
        "| holdout | greedy | 0.2500 | 0.7500 |",
        "Training reward: 0.1000 in the first step, 0.6000 in step 2.",
        "$ slime run --recipe 'my recipe.toml'",
        "$ slime run --resume --run r --set steps=2",
        "$ slime export --run r --step 2 --quantize fp8",
        "linear layers in fp8 |",
        f"| exported by | slime {code_version()} |",
        '"sft": {',
    ):
        assert said in card, said
    front = card.split("---")[1]
    assert "base_model" not in front


def test_a_trainer_checkpoint_is_cast_as_the_recipe_says(trained, tmp_path, capsys):
    target, model = trained
    tensors = dict(HfFolder(model).iterate())
    state = {f"{kind}/{n}": t.clone() for n, t in tensors.items() for kind in ("weight", "exp_avg")}
    folder = target.checkpoint_dir(2) / "trainer"
    folder.mkdir()
    save_state(folder, state, 2, 0, 1)
    shutil.copytree(model, target.model_dir)
    out = tmp_path / "o"
    assert run(["export", "--from", str(target.checkpoint_dir(2)), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["from"] == "trainer checkpoint"
    found = HfFolder(out)
    assert found.names == sorted(tensors) and set(found.dtypes.values()) == {torch.bfloat16}
    assert all(torch.equal(found.read(n), t.bfloat16()) for n, t in tensors.items())
    assert (out / "chat_template.jinja").is_file()


def test_a_folder_by_its_path(trained, tmp_path, capsys):
    _, model = trained
    words = ["export", "--from", str(model), "--quantize", "fp8", "--max-shard-size", "100KB"]
    assert run([*words, "--out", str(tmp_path / "o"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["quantized"] == "fp8" and done["shards"] > 1
    assert open_weights(tmp_path / "o").names == HfFolder(model).names
    card = (tmp_path / "o" / "README.md").read_text()
    assert "slime export --from model --quantize fp8 --max-shard-size 100000 --out o" in card
    published = [
        p.read_text() for p in (tmp_path / "o").glob("*") if p.suffix in (".md", ".json") and p.name != files.DONE
    ]
    assert not any(str(tmp_path) in text for text in published), "names of folders are nobody's business"
    assert run([*words, "--out", str(tmp_path / "o")]) == 2
    assert "exists already\n  fix: choose another --out, or remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "what is to be exported"),
        (["--from", "MODEL"], "where does the result go"),
        (["--from", "MODEL", "--out", "o", "--step", "1"], "--step names a step of a run"),
        (["--from", "MODEL", "--out", "MODEL/inside"], "lies in, or contains"),
        (["--run", "absent"], "no run at"),
        (["--run", "r", "--quantize", "int4"], "--quantize 'int4'"),
        (["--run", "r", "--dtype", "int8"], "dtype 'int8' is not known"),
        (["--run", "r", "--max-shard-size", "many"], "is no size"),
        (["--run", "r", "--out", "RUN"], "lies in, or contains"),
        (["--run", "r", "--out", "RUN/checkpoints/step_000001"], "is no export of slime"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(words, said, trained, tmp_path, monkeypatch, capsys):
    target, model = trained
    monkeypatch.chdir(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*") if p.name != ".lock")
    words = [w.replace("MODEL", str(model)).replace("RUN", str(target.root)) for w in words]
    assert run(["export", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(p for p in tmp_path.rglob("*") if p.name != ".lock") == before


def test_the_export_of_a_run_is_made_anew(trained, tmp_path):
    target, _ = trained
    assert export_checkpoint(target, 1) == export_checkpoint(target, 2)
    assert files.read_json(target.export_dir / files.DONE)["step"] == 2
    export_checkpoint(target, 1, out=tmp_path / "o")
    with pytest.raises(UsageError, match="exists already"):
        export_checkpoint(target, 2, out=tmp_path / "o")


def test_every_option_of_the_command_line_is_told():
    given = {"run": "my run", "step": 0, "dtype": "", "quantize": "fp8", "max-shard-size": 0, "out": None}
    assert command_line(given) == "slime export --run 'my run' --step 0 --quantize fp8"
