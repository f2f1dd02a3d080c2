import pytest

from slimecli import files
from slimecli.errors import MissingStageError, SlimeError, UsageError
from slimecli.pipeline import LAYOUT_ONLY, PIPELINE, layout_change, trainer_layout
from slimecli.recipe import load_recipe
from slimecli.recipe_sections import TrainerSection
from slimecli.rundir import create_run
from slimecli.stage import Stage, ensure, fingerprint, require, why_new


@pytest.fixture
def run(runs_root):
    return create_run("r", load_recipe(""))


def make_stage(name="a", needs=()):
    return Stage(
        name=name,
        needs=needs,
        inputs=lambda recipe: recipe.seed,
        outputs=lambda run, recipe: [run.root / f"out_{name}"],
        command=lambda run: f"slime {name}",
    )


def do(stage, run, recipe, told=None):
    def work():
        with files.committed_folder(run.root / f"out_{stage.name}") as folder:
            (folder / "x").write_text("1")
        return {"n": 1}

    return ensure(stage, run, recipe, work, lambda *line: told.append(line) if told is not None else None)


def test_done_once_then_skipped_with_the_reason(run):
    told = []
    recipe = load_recipe("")
    assert do(make_stage(), run, recipe, told) is True
    assert do(make_stage(), run, recipe, told) is False
    assert told[0] == ("a", "running", "not done yet")
    assert told[-1] == ("a", "skipped", "nothing changed")


def test_new_inputs_make_it_new(run):
    do(make_stage(), run, load_recipe(""))
    assert why_new(make_stage(), run, load_recipe("", ("seed=1",))) == "its inputs have changed"
    assert why_new(make_stage(), run, load_recipe("", ("steps=7",))) == ""


def test_lost_or_damaged_output_makes_it_new(run):
    recipe = load_recipe("")
    do(make_stage(), run, recipe)
    (run.root / "out_a" / "x").write_text("12")
    assert "is gone" in why_new(make_stage(), run, recipe)


def test_a_new_upstream_makes_it_new(run):
    up, down, recipe = make_stage("a"), make_stage("b", ("a",)), load_recipe("")
    do(up, run, recipe)
    do(down, run, recipe)
    changed = load_recipe("", ("seed=5",))
    do(up, run, changed)
    assert why_new(Stage(**{**down.__dict__, "inputs": lambda r: 0}), run, changed) == "its inputs have changed"


def test_failure_is_recorded_and_done_again(run):
    recipe = load_recipe("")
    with pytest.raises(SlimeError, match="boom"):
        ensure(make_stage(), run, recipe, lambda: (_ for _ in ()).throw(SlimeError("boom")), lambda *line: None)
    assert files.read_json(run.stage_path("a"))["status"] == "failed"
    assert why_new(make_stage(), run, recipe) == "was failed"


def test_a_stage_that_leaves_nothing_is_an_error(run):
    with pytest.raises(SlimeError, match="without its output"):
        ensure(make_stage(), run, load_recipe(""), lambda: {}, lambda *line: None)
    assert files.read_json(run.stage_path("a"))["status"] == "failed"


def test_missing_upstream_names_the_command(run):
    stages = {"a": make_stage("a"), "b": make_stage("b", ("a",))}
    with pytest.raises(MissingStageError, match="slime a"):
        require(stages, "b", run, load_recipe(""))


OTHER = {
    "processes": 2,
    "warmup_steps": 3,
    "backend": "megatron",
    "activation_checkpointing": True,
    "shared_prefix": False,
}
OF_RL_ALONE = {"global_batch_size", "steps_per_rollout", "lr", "warmup_steps", "lr_schedule", "min_lr_ratio"}


def changed(value):
    if isinstance(value, str):
        return "cosine" if value == "constant" else "constant"
    return value / 2 if isinstance(value, float) and value else value + 1 if value else 0.125


@pytest.mark.parametrize("field", TrainerSection.model_fields)
def test_sft_is_made_anew_for_every_trainer_value_that_its_result_depends_on(run, field):
    recipe = load_recipe("", ("sft.steps=5",))
    trainer = recipe.trainer.model_copy(update={field: OTHER.get(field, changed(getattr(recipe.trainer, field)))})
    assert trainer != recipe.trainer
    other = recipe.model_copy(update={"trainer": trainer})
    same = fingerprint(PIPELINE["sft"], run, other) == fingerprint(PIPELINE["sft"], run, recipe)
    assert same == (field in OF_RL_ALONE or field in LAYOUT_ONLY)


def test_a_full_disk_does_not_hide_why_a_stage_ended(run, monkeypatch):
    real = files.write_json

    def full(path, data):
        if data.get("status") == "failed":
            raise SlimeError("disk full")
        real(path, data)

    def work():
        raise SlimeError("the cause")

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(SlimeError, match="the cause"):
        ensure(make_stage(), run, load_recipe(""), work, lambda *line: None)


def test_another_layout_is_told_another_backend_refused():
    sizes = ("trainer.backend=megatron", "trainer.processes=2", "megatron.attention_backend=flash")
    before = load_recipe("", (*sizes, "megatron.tensor-model-parallel-size=2"))
    manifest = {"step": 3, "trainer": trainer_layout(before)}
    assert layout_change(before, manifest) == layout_change(before, {"step": 3}) == ""
    after = load_recipe("", (*sizes, "megatron.pipeline_model_parallel_size=2"))
    told = layout_change(after, manifest)
    assert "processes 2, pipeline_model_parallel_size 2 (before: processes 2, tensor_model_parallel_size 2)" in told
    with pytest.raises(UsageError, match="'megatron', whose optimizer state 'fsdp' cannot take over"):
        layout_change(load_recipe(""), manifest)


def test_the_layout_of_megatron_makes_no_new_sft_other_arguments_do(run):
    one, two, other = (
        load_recipe("quickstart", ("trainer.backend=megatron", f"megatron.{x}"))
        for x in ("tensor-model-parallel-size=2", "pipeline_model_parallel_size=2", "moe_aux_loss_coeff=0.1")
    )
    first, second, third = (fingerprint(PIPELINE["sft"], run, r) for r in (one, two, other))
    assert first == second != third
