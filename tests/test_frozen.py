"""Frozen models that are Megatron checkpoints: a copy in HF form, made once, in place of the checkpoint."""

import json
import shutil

import pytest

from slimecli import files
from slimecli.errors import MissingStageError
from slimecli.frozen import frozen_copy, loadable, with_copies
from slimecli.pipeline import PIPELINE
from slimecli.plan import make_plan
from slimecli.plan_checks import check_distillation, check_topology
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.stage import fingerprint, why_new
from slimecli.weights.convert import hf_to_torch_dist
from slimecli.weights.source import materialise_frozen
from tests.forked import slime, succeed
from tests.models import tiny_model
from tests.tiny_run import assert_same_weights, metrics, sets

SHORT = ("data.max_prompt_tokens=32", "rollout.max_response_tokens=32")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """(HF folder, Megatron checkpoint of it)."""
    folder = tmp_path_factory.mktemp("frozen")
    hf_to_torch_dist(tiny_model(folder / "hf"), folder / "megatron")
    return folder / "hf", folder / "megatron"


def recipe_of(*overrides):
    return load_recipe("", (*SHORT, *overrides))


def test_each_role_has_its_copy_and_a_folder_of_hugging_face_is_read_where_it_lies(megatron, runs_root):
    hf, checkpoint = megatron
    models = f"engine.models=[{{name='a/b', path='{checkpoint}/release'}}, {{name='c', path='{hf}'}}]"
    recipe = recipe_of(f"distill.teacher={checkpoint}", models)
    run = create_run("r", recipe)
    with pytest.raises(MissingStageError, match=r"no copy in HF form of .*megatron \(teacher\)") as told:
        loadable(recipe, run)
    assert told.value.fix == f"slime run --resume --run {run.quoted} --until frozen"
    made = materialise_frozen(recipe, run)
    assert made == {"teacher": run.root / "model/teacher", "served-a%2Fb": run.root / "model/served-a%2Fb"}
    for folder in made.values():
        assert_same_weights(folder, hf)
    found = loadable(recipe, run)
    assert found.distill.teacher == str(run.root / "model/teacher")
    assert [m.path for m in found.engine.models] == [str(made["served-a%2Fb"]), str(hf)]


def test_it_is_made_once_and_anew_for_another_checkpoint(megatron, tmp_path, runs_root):
    mine = tmp_path / "mine"
    shutil.copytree(megatron[1], mine)
    recipe = recipe_of(f"distill.teacher={mine}")
    run = create_run("r", recipe)
    folder = materialise_frozen(recipe, run)["teacher"]
    before = (folder / files.DONE).read_bytes()
    materialise_frozen(recipe, run)
    assert (folder / files.DONE).read_bytes() == before
    shutil.rmtree(mine)  # the run has what it needs
    assert frozen_copy(run, "teacher", str(mine)) == folder
    assert list(check_distillation(with_copies(recipe, run), run)) == []
    other = tiny_model(tmp_path / "other", seed=1)
    hf_to_torch_dist(other, tmp_path / "second")
    changed = recipe_of(f"distill.teacher={tmp_path}/second")
    with pytest.raises(MissingStageError) as told:
        loadable(changed, run)
    assert told.value.fix.endswith(f" --set distill.teacher={tmp_path}/second --until frozen")
    assert_same_weights(materialise_frozen(changed, run)["teacher"], other)


def test_another_teacher_is_a_new_stage_and_the_others_stay_done(megatron, runs_root):
    one, two = (recipe_of(f"distill.teacher={path}") for path in (megatron[1], megatron[1] / "release"))
    run, stage = create_run("r", one), PIPELINE["frozen"]
    assert why_new(stage, run, one) == "not done yet"
    assert [fingerprint(PIPELINE[n], run, one) for n in ("data", "model", "sft")] == [
        fingerprint(PIPELINE[n], run, two) for n in ("data", "model", "sft")
    ]
    assert fingerprint(stage, run, one) != fingerprint(stage, run, two)
    assert not stage.wanted(recipe_of(f"distill.teacher={megatron[0]}"))
    assert not stage.wanted(recipe_of(f"distill.teacher={megatron[1]}", "steps=0", "sft.steps=3"))


def test_the_plan_counts_it_and_tells_what_it_lacks(megatron, tmp_path, runs_root):
    hf, checkpoint = megatron
    tiny = [item for word, item in zip(sets()[::2], sets()[1::2], strict=True) if word == "--set"]
    planned = make_plan(load_recipe("quickstart", (*tiny, f"distill.teacher={checkpoint}")))
    weights = sum(p.stat().st_size for p in hf.glob("*.safetensors"))
    assert planned.value("disk", "frozen models") == pytest.approx(weights, rel=0.05)
    assert "teacher" in {v.name for v in planned.values if v.group == "memory of a trainer process"}
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    shutil.rmtree(bare / "hf")
    lacking = recipe_of(f"distill.teacher={bare}", f"engine.models=[{{name='x', path='{bare}'}}]")
    (problem,) = check_distillation(lacking, None)
    assert problem == f"`distill.teacher` = '{bare}': there is no config.json; put it into its folder hf"
    assert f"`engine.models` 'x': '{bare}': there is no config.json; put it into its folder hf" in check_topology(
        lacking, None
    )
    shutil.copytree(checkpoint / "hf", bare / "hf")
    config = json.loads((bare / "hf/config.json").read_text())
    (bare / "hf/config.json").write_text(json.dumps(config | {"model_type": "gpt2", "architectures": ["GPT2"]}))
    (problem,) = check_distillation(recipe_of(f"distill.teacher={bare}"), None)
    assert "gpt2" in problem


def test_a_run_with_it_is_the_run_with_the_folder_it_was_made_of_also_after_a_kill(tmp_path):
    tiny_model(tmp_path / "hf", vocab=512)
    hf_to_torch_dist(tmp_path / "hf", tmp_path / "megatron")
    short = ("steps=1", "sft.steps=0", "eval.interval=0")

    def words(name, teacher):
        return ("run", "--recipe", "quickstart", "--run", name, *sets(*short, f"distill.teacher={teacher}"))

    succeed(*words("plain", "hf"), folder=tmp_path)
    model_done = succeed(*words("counted", "megatron"), "--until", "model", folder=tmp_path).fsyncs
    frozen_done = succeed(*words("counted2", "megatron"), "--until", "frozen", folder=tmp_path).fsyncs
    kill_at = (model_done + frozen_done) // 2
    assert slime(*words("killed", "megatron"), folder=tmp_path, kill_at=kill_at).code == -9
    run = tmp_path / "runs/killed"
    assert not files.is_committed(run / "model/teacher")
    shutil.copytree(run, tmp_path / "runs/alone", symlinks=True)
    refused = slime("train", "--run", "alone", folder=tmp_path)
    assert refused.code == 3
    assert refused.err.endswith("/runs/alone --until frozen\n")
    succeed("run", "--resume", "--run", "killed", folder=tmp_path)
    assert_same_weights(run / "model/teacher", tmp_path / "hf")
    assert metrics(run) == metrics(tmp_path / "runs/plain")
    assert "train/teacher_kl" in metrics(run)[-1]
