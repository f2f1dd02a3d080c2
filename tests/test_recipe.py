import json

import pytest

from slimecli.errors import RecipeError, UsageError
from slimecli.recipe import load_recipe, parse_override, recipe_fields, shipped_recipes, validate_recipe


def problems(tree):
    with pytest.raises(RecipeError) as caught:
        validate_recipe(tree)
    return caught.value.problems


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"trainer": {"lrr": 1}}, "unknown key `trainer.lrr` (did you mean 'trainer.lr'?)"),
        ({"trainr": {"lr": 1}}, "unknown key `trainr` (did you mean 'trainer'?)"),
        ({"stepz": 1}, "unknown key `stepz` (did you mean 'steps'?)"),
        ({"trainer": 3}, "`trainer` = 3: this is a section; write a [trainer] table"),
        ({"rollout": {"batch_size": "many"}}, "`rollout.batch_size` = 'many': input should be a valid integer"),
        ({"rollout": {"top_p": 1.5}}, "`rollout.top_p` = 1.5: input should be less than or equal to 1"),
        ({"engine": {"backend": "embeded"}}, "(did you mean 'embedded'?)"),
        ({"seed": -1}, "`seed` = -1"),
        ({"rollout": {"temperature": float("inf")}}, "`rollout.temperature` = inf: input should be a finite number"),
        ({"data": {"mix": {"a": float("nan")}}}, "`data.mix.a` = nan: input should be a finite number"),
        ({"engine": {"urls": "http://ü"}}, "= 'http://ü': input should be a valid list, e.g. [\"http://ü\"]"),
    ],
)
def test_each_mistake_is_named_with_its_path_and_the_nearest_name(tree, expected):
    (problem,) = problems(tree)
    assert expected in problem


def test_all_mistakes_are_told_at_once():
    assert len(problems({"trainr": {}, "algo": {"kl_type": "k9"}, "steps": -3, "eval": {"x": 1}})) == 4


def test_the_order_is_file_then_model_then_set(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('steps = 7\n[model]\nname = "qwen3-0.6b"\ndtype = "float32"\n[trainer]\nlr = 1e-3\n')
    recipe = load_recipe(str(file), ("trainer.lr=2e-3", "data.train=x.jsonl", "rollout.stop=['a']"), model="./dir")
    assert recipe.steps == 7
    assert recipe.trainer.lr == 2e-3
    assert recipe.data.train == "x.jsonl"
    assert recipe.rollout.stop == ["a"]
    assert (recipe.model.path, recipe.model.name, recipe.model.source) == ("./dir", "", "path")
    assert recipe.model.dtype == "float32"


def test_overrides_are_toml_or_plain_text():
    assert parse_override("a.b=1e-6") == (["a", "b"], 1e-6)
    assert parse_override("a=true") == (["a"], True)
    assert parse_override("data.train=/x/y=z.jsonl") == (["data", "train"], "/x/y=z.jsonl")
    with pytest.raises(UsageError, match="key=value"):
        parse_override("trainer.lr")
    with pytest.raises(UsageError, match="not a section"):
        load_recipe("", ("steps.x=1", "steps.x.y=2"))


def test_syntax_errors_name_line_and_column(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text("steps = 7\nseed = = 2\n")
    with pytest.raises(RecipeError, match=r"line 2, column 8"):
        load_recipe(str(file))


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="quickstart"):
        load_recipe("quickstrat")


def test_the_resolved_form_reads_back_as_the_same_recipe():
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert validate_recipe(json.loads(recipe.to_json())) == recipe


def test_recipes_are_frozen():
    recipe = validate_recipe({})
    with pytest.raises(Exception, match="frozen"):
        recipe.trainer.lr = 1.0


def test_sync_kind_follows_from_where_things_run():
    assert validate_recipe({}).sync_kind("ray") == "shared_memory"
    assert validate_recipe({}).sync_kind("local") == "in_process"
    assert validate_recipe({"engine": {"urls": ["http://h:1"]}}).sync_kind("ray") == "disk"
    broadcast = validate_recipe({"sync": {"kind": "distributed"}})
    assert broadcast.sync_kind("ray") == "distributed"
    assert broadcast.sync_kind("local") == "in_process", "one process cannot broadcast to itself"


def test_fields_are_listed_with_default_and_help():
    fields = {name: (default, text) for name, default, text in recipe_fields()}
    assert fields["trainer.lr"] == (1e-6, "peak learning rate")
    assert "trainer" not in fields


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 3\r\n[trainer]\r\nlr = 1e-3\r\n")
    assert (load_recipe(str(path)).steps, load_recipe(str(path)).trainer.lr) == (3, 1e-3)


@pytest.mark.parametrize(
    ("sets", "one"),
    [
        ((), True),
        (("engine.urls=['http://127.0.0.1:1', 'http://localhost:2']",), True),
        (("engine.urls=['http://127.0.0.1:1', 'http://10.1.2.3:1']",), False),
        (("cluster.address='10.1.2.3:6379'",), False),
    ],
)
def test_one_host(sets, one):
    assert load_recipe("", sets).is_one_host is one
