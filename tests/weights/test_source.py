import json

import pytest

from slimecli import files
from slimecli.errors import DataError, MissingStageError, UsageError
from slimecli.plan_checks import check_model
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.weights.convert import hf_to_torch_dist
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from slimecli.weights.source import materialise_model, resolve_model_dir
from tests.forked import succeed
from tests.models import tiny_model


def made(runs_root, *sets):
    recipe = load_recipe("", sets)
    return recipe, create_run("r", recipe)


def test_a_local_folder_is_taken_whole(tmp_path, runs_root):
    model = tiny_model(tmp_path / "m")
    (model / "evil.py").write_text("")
    recipe, run = made(runs_root, "model.source='path'", f"model.path='{model}'")
    assert materialise_model(recipe, run) == run.model_dir and files.is_committed(run.model_dir)
    assert fingerprint(HfFolder(run.model_dir).iterate()) == fingerprint(HfFolder(model).iterate())
    assert (run.model_dir / "tokenizer.json").is_file() and not (run.model_dir / "evil.py").exists()


def test_a_folder_that_is_not_what_its_name_says_is_refused(tmp_path, runs_root):
    model = tiny_model(tmp_path / "m")
    recipe, run = made(runs_root, "model.source='path'", f"model.path='{model}'", "model.name='qwen3-0.6b'")
    with pytest.raises(DataError, match="layers: spec 28, config 3"):
        materialise_model(recipe, run)
    assert not run.model_dir.exists()


SHORT = ("data.max_prompt_tokens=64", "rollout.max_response_tokens=64")


def test_a_megatron_checkpoint_is_a_model_too(tmp_path, runs_root):
    model = tiny_model(tmp_path / "m")
    hf_to_torch_dist(model, tmp_path / "megatron")
    for number, checkpoint in enumerate((tmp_path / "megatron", tmp_path / "megatron/release")):
        recipe = load_recipe("", ("model.source='path'", f"model.path='{checkpoint}'", *SHORT))
        assert list(check_model(recipe, None)) == []
        run = create_run(f"r{number}", recipe)
        assert materialise_model(recipe, run) == run.model_dir and files.is_committed(run.model_dir)
        assert fingerprint(HfFolder(run.model_dir).iterate()) == fingerprint(HfFolder(model).iterate())
        assert (run.model_dir / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_a_megatron_checkpoint_without_a_config_is_told_before_a_run(tmp_path):
    hf_to_torch_dist(tiny_model(tmp_path / "m"), tmp_path / "megatron")
    (tmp_path / "megatron/hf").rename(tmp_path / "lost")
    recipe = load_recipe("", ("model.source='path'", f"model.path='{tmp_path}/megatron'", *SHORT))
    problems = list(check_model(recipe, None))
    assert problems == [f"`model.path` = '{tmp_path}/megatron': there is no config.json; put it into its folder hf"]


def test_where_only_a_folder_of_hugging_face_will_do_the_way_to_it_is_told(tmp_path):
    hf_to_torch_dist(tiny_model(tmp_path / "m"), tmp_path / "megatron")
    for checkpoint in (tmp_path / "megatron", tmp_path / "megatron/release"):
        with pytest.raises(DataError, match="is a Megatron checkpoint") as told:
            resolve_model_dir(str(checkpoint))
        assert told.value.fix == f"slime convert --from {checkpoint} --to hf --out {checkpoint}-hf"
        succeed(*told.value.fix.split()[1:], folder=tmp_path)
        assert resolve_model_dir(f"{checkpoint}-hf")


def test_new_weights_with_a_tokenizer_from_the_data(runs_root):
    recipe, run = made(runs_root, "model.source='init'", "model.name='quickstart'", "model.tokenizer_vocab=280")
    with pytest.raises(MissingStageError, match="no data"):
        materialise_model(recipe, run)
    run.data_dir.mkdir()
    rows = [{"messages": [{"role": "user", "content": f"{i} plus {i}?"}]} for i in range(20)]
    (run.data_dir / "sft.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    folder = materialise_model(recipe, run)
    assert HfFolder(folder).shapes["model.embed_tokens.weight"] == (280, 64)
    assert not (folder / "tokenizer").exists() and files.is_committed(folder)


def test_names_and_paths_resolve(tmp_path):
    model = tiny_model(tmp_path / "m")
    assert resolve_model_dir(str(model)) == model
    with pytest.raises(UsageError, match="no published weights"):
        resolve_model_dir("quickstart")
    with pytest.raises(DataError, match="not a folder"):
        resolve_model_dir("./nowhere")
