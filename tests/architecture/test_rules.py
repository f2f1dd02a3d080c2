"""House rules that a machine can check."""

import ast
import importlib
import inspect
import shlex

import pytest
import typer

from slimecli.cli import COMMANDS, PANELS, build_app
from slimecli.recipe import Recipe, load_recipe, recipe_fields, shipped_recipes
from tests.architecture.sources import LINKED, ROOT, library_files, module_name, tree_of

GROUP = typer.main.get_command(build_app())


def test_only_env_touches_the_environment():
    wrong = []
    for path in library_files():
        if module_name(path) == "slimecli.env":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"):
                wrong.append(f"{module_name(path)}:{node.lineno}")
    assert wrong == []


def test_nothing_is_unpickled_unless_every_class_is_named():
    """A pickle runs code. The one format that needs it (Megatron's .metadata) is read through a list of classes."""
    wrong = []
    for path in library_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(b) for b in node.bases):
                methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
                wrong += [] if "find_class" in methods else [f"{path}:{node.lineno}"]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads"):
                wrong.append(f"{path}:{node.lineno}")
            if called == "torch.load":
                safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                wrong += [] if safe else [f"{path}:{node.lineno}"]
    assert wrong == []


def test_no_process_is_killed_by_name():
    texts = {p: p.read_text(encoding="utf-8") for p in library_files()}
    assert [str(p) for p, text in texts.items() if "pkill" in text or "killall" in text] == []


def test_no_unfinished_code():
    wrong = []
    for path in library_files():
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path}: {word}" for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]
    assert wrong == []


def test_every_public_thing_has_a_docstring():
    wrong = []
    for path in library_files():
        tree = tree_of(path)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            wrong.append(module_name(path))
        for node in tree.body:
            is_thing = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_thing and not node.name.startswith("_") and not ast.get_docstring(node):
                wrong.append(f"{module_name(path)}.{node.name}")
    assert wrong == []


def test_every_recipe_field_is_documented():
    fields = list(recipe_fields())
    assert len(fields) > 80
    undocumented = [name for name, _, text in fields if len(text) < 4 and not name.startswith("seed")]
    assert undocumented == []
    assert all(
        (info.annotation.__doc__ or "").strip()
        for name, info in Recipe.model_fields.items()
        if "Section" in str(info.annotation)
    )


def test_every_shipped_recipe_is_valid_and_says_what_it_is():
    assert {"quickstart", "sft", "grpo"} <= set(shipped_recipes())
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.title and recipe.source, name


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_everything_imports(path):
    assert importlib.import_module(module_name(path))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name):
    module = importlib.import_module(COMMANDS[name])
    assert module.EXAMPLES
    assert module.__doc__.startswith(f"`slime {name}`")
    command = GROUP.commands[name]
    assert command.help
    for example in module.EXAMPLES:
        words = shlex.split(example.partition(" > ")[0].partition(" | ")[0].partition(" < ")[0], comments=True)
        words = words[1:] if "=" in words[0] else words  # an environment variable may stand in front
        assert words[:2] == ["slime", name], example
        command.make_context(name, words[2:])


def test_every_command_file_is_a_command_in_one_panel():
    files = {p.stem.replace("_", "-") for p in (ROOT / "commands").glob("*.py") if not p.name.startswith("_")}
    assert files == set(COMMANDS)
    assert sorted(n for members in PANELS.values() for n in members) == sorted(COMMANDS)


def test_flags_that_mean_the_same_are_spelt_the_same():
    meanings: dict[str, set[str]] = {}
    for name in COMMANDS:
        for parameter in GROUP.commands[name].params:
            for flag in parameter.opts:
                if flag in ("--run", "--recipe", "--model", "--set", "--json", "--force"):
                    meanings.setdefault(flag, set()).add(parameter.metavar or "flag")
    assert {flag: kinds for flag, kinds in meanings.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize("folder", LINKED)
def test_linked_folders_refuse_their_bare_name(folder):
    assert (ROOT / "slimecli" / folder).is_symlink()
    assert (ROOT / "slimecli" / folder).readlink().as_posix() == f"../{folder}"
    with pytest.raises(ImportError, match=f"slimecli.{folder}"):
        importlib.import_module(folder)


def test_protocols_are_small():
    from slimecli import protocols

    for name in ("RolloutEngine", "Trainer"):
        methods = [n for n, m in inspect.getmembers(getattr(protocols, name), inspect.isfunction) if n[0] != "_"]
        assert 1 <= len(methods) <= 6, name


def test_the_loop_fits_on_a_screen():
    text = (ROOT / "slimecli" / "loop.py").read_text(encoding="utf-8")
    (loop,) = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "loop"]
    assert (loop.end_lineno or 0) - loop.lineno < 40
    assert len(text.splitlines()) <= 200
