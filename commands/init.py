"""`slime init`: a commented recipe to start from."""

from __future__ import annotations

from typing import Annotated

import typer

from slimecli.commands._options import JsonOpt, TextOutOpt, is_stdout

EXAMPLES = [
    "slime init",
    "slime init --from quickstart --out my-recipe.toml",
]

_HEAD = """\
# A recipe for slime. Lines that begin with `#` show defaults; remove the `#` to change one.
#
#   slime plan --recipe {name}    everything that is wrong, and what it would take
#   slime run  --recipe {name}    do it
"""


def write_recipe(out: str = "recipe.toml", base: str = "") -> str:
    """Write a recipe with every field, its default and its help as comments; an existing file is refused.

    Args:
        out: file to write.
        base: recipe whose values are set; empty: all fields stay at their defaults.

    Returns: the path.
    """
    from pathlib import Path

    from slimecli import files
    from slimecli.errors import UsageError

    path = Path(out)
    if path.exists():
        raise UsageError(f"{path} exists already and is left as it is", "slime init --out ANOTHER.toml")
    files.write_text(path, recipe_text(base, path.name))
    return str(path)


def recipe_text(base: str, name: str) -> str:
    """TOML of the whole recipe: fields of `base` set, all others commented out."""
    from slimecli.recipe import read_toml, recipe_fields, recipe_path

    given = read_toml(recipe_path(base)) if base else {}
    lines = [_HEAD.format(name=name)]
    section = ""
    found = list(recipe_fields())
    # TOML wants all keys of a table together, and those of none before the first table
    tables = ["", *dict.fromkeys(name.rpartition(".")[0] for name, _, _ in found)]
    fields = sorted(found, key=lambda f: tables.index(f[0].rpartition(".")[0]))
    for dotted, default, text in fields:
        head, _, key = dotted.rpartition(".")
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        tree = given.get(head, {}) if head else given
        is_given = key in tree
        lines.append(f"# {text}")
        lines.append(f"{'' if is_given else '# '}{key} = {_toml(tree[key] if is_given else default)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """A TOML literal."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def cli(
    base: Annotated[str, typer.Option("--from", metavar="NAME|FILE", help="recipe whose values are filled in")] = "",
    out: TextOutOpt = "recipe.toml",
    json_: JsonOpt = False,
) -> None:
    """Write a commented recipe into the current folder."""
    from slimecli import console

    if is_stdout(out, json_=json_):
        return console.emit_line(recipe_text(base, "recipe.toml").rstrip("\n"))
    path = write_recipe(out, base)
    console.emit({"file": path}) if json_ else console.emit_line(path)
    console.hint(f"slime plan --recipe {path}", "after editing it: everything that is wrong, at once")
    console.hint(f"slime run --recipe {path}", "do it")
    return None
