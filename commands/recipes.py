"""`slime recipes`: list, show and copy shipped recipes; every field and algorithm with its help."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slimecli.commands._options import STDOUT, JsonOpt, ModelOpt, SetOpt

EXAMPLES = [
    "slime recipes",
    "slime recipes show quickstart",
    "slime recipes copy quickstart my-recipe.toml",
    "slime recipes show quickstart --resolved --set steps=200",
    "slime recipes --fields",
    "slime recipes --algorithms",
]


def list_recipes() -> list[dict[str, str]]:
    """[{"name", "title", "source", "file"}] of the shipped recipes."""
    from slimecli.recipe import read_toml, shipped_recipes

    rows = []
    for name, path in shipped_recipes().items():
        tree = read_toml(path)
        rows.append({"name": name, "title": tree.get("title", ""), "source": tree.get("source", ""), "file": str(path)})
    return rows


def show_recipe(name: str) -> str:
    """The TOML text of a recipe."""
    from slimecli.recipe import recipe_path

    return recipe_path(name).read_text(encoding="utf-8")


def resolve_recipe(name: str, overrides: tuple[str, ...] = (), model: str = "") -> str:
    """Every value that is in force, defaults and overrides included, as JSON: what a run keeps as recipe.json."""
    from slimecli.recipe import load_recipe

    return load_recipe(name, overrides, model).to_json()


def copy_recipe(name: str, target: str) -> str:
    """Write a recipe to a new file and return its path; an existing file is refused."""
    from pathlib import Path

    from slimecli import files
    from slimecli.errors import UsageError

    path = Path(target)
    if path.is_dir():
        path = path / f"{Path(name).stem}.toml"
    if path.exists():
        raise UsageError(f"{path} exists already", "name another file")
    files.write_text(path, show_recipe(name))
    return str(path)


def list_fields() -> list[dict[str, Any]]:
    """[{"field", "default", "help"}] of everything a recipe can say."""
    from slimecli.recipe import recipe_fields

    return [{"field": name, "default": default, "help": text} for name, default, text in recipe_fields()]


def list_algorithms() -> list[dict[str, str]]:
    """[{"name", "does"}]: the first line of each algorithm's own file."""
    import ast
    from pathlib import Path

    import slimecli
    from slimecli.static import registry_entries

    rows = []
    for name, target in registry_entries("slimecli.algos", "ALGORITHMS").items():
        path = Path(slimecli.__file__).parent.joinpath(*target.partition(":")[0].split(".")[1:]).with_suffix(".py")
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append({"name": name, "does": doc.partition("\n")[0]})
    return rows


def cli(
    action: Annotated[str, typer.Argument(metavar="[show|copy]", help="what to do; nothing: list")] = "",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="recipe name or TOML file")] = "",
    target: Annotated[str, typer.Argument(metavar="[FILE]", help="file to copy to; - is the standard output")] = "",
    fields: Annotated[bool, typer.Option("--fields", help="every recipe field with default and help")] = False,
    algorithms: Annotated[bool, typer.Option("--algorithms", help="the algorithms algo.name can name")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="with show: every value in force, as JSON")] = False,
    model: ModelOpt = "",
    set_: SetOpt = None,
    json_: JsonOpt = False,
) -> None:
    """Show the recipes that come with slime, and everything a recipe can say."""
    from slimecli import console
    from slimecli.errors import UsageError

    if fields or algorithms:
        rows: list[dict[str, Any]] = list_fields() if fields else list(list_algorithms())
        console.emit(rows) if json_ else console.table(rows, list(rows[0]))
    elif not action:
        found = list_recipes()
        console.emit(found) if json_ else console.table(found, ["name", "title"])
        console.hint("slime recipes show NAME", "the recipe itself")
        console.hint("slime run --recipe NAME", "do it")
    elif action == "show" and name and resolved:
        console.emit_line(resolve_recipe(name, tuple(set_ or ()), model).rstrip("\n"))
    elif name and (action == "show" or (action == "copy" and target == STDOUT)):
        text = show_recipe(name)
        console.emit({"name": name, "toml": text}) if json_ else console.emit_line(text.rstrip("\n"))
    elif action == "copy" and name and target:
        path = copy_recipe(name, target)
        console.emit({"file": path}) if json_ else console.emit_line(path)
        console.hint(f"slime plan --recipe {path}", "after editing it")
    else:
        raise UsageError(
            f"`slime recipes {' '.join(x for x in (action, name, target) if x)}` is not complete",
            "slime recipes | slime recipes show NAME | slime recipes copy NAME FILE",
        )
