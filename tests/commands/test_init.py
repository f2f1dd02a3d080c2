import tomllib

import pytest

from slimecli.cli import run
from slimecli.commands.init import write_recipe
from slimecli.errors import UsageError
from slimecli.recipe import load_recipe, recipe_fields, shipped_recipes


def test_the_bare_template_is_the_defaults_and_names_every_field(tmp_path):
    path = tmp_path / "recipe.toml"
    write_recipe(str(path))
    assert load_recipe(str(path)) == load_recipe()
    text = path.read_text()
    for name, _, text_of_field in recipe_fields():
        assert f"# {name.rpartition('.')[2]} = " in text
        assert text_of_field in text


def test_uncommenting_every_line_gives_valid_toml_with_the_same_values(tmp_path):
    path = tmp_path / "recipe.toml"
    write_recipe(str(path))
    names = {name.rpartition(".")[2] for name, _, _ in recipe_fields()}
    lines = path.read_text().splitlines()
    bare = [x.removeprefix("# ") if x.startswith("# ") and x[2:].partition(" = ")[0] in names else x for x in lines]
    path.write_text("\n".join(bare))
    assert tomllib.loads(path.read_text())["trainer"]["lr"] == 1e-6
    assert load_recipe(str(path)) == load_recipe()


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_template_from_a_recipe_means_the_same(name, tmp_path):
    path = tmp_path / "mine.toml"
    write_recipe(str(path), base=name)
    assert load_recipe(str(path)) == load_recipe(name)


def test_an_existing_file_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    assert capsys.readouterr().out == "recipe.toml\n"
    (tmp_path / "recipe.toml").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_recipe()
    assert run(["init"]) == 2
    assert (tmp_path / "recipe.toml").read_text() == "mine"
