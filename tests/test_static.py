import sys

import pytest

from slimecli.static import hook_problem, module_file, registry_entries, registry_names, top_names


def test_registries_are_read_without_importing_their_module():
    assert registry_names("slimecli.algos", "ALGORITHMS")[:1] == ["grpo"]
    assert registry_entries("slimecli.trainers", "TRAINERS")["fsdp"] == "slimecli.trainers.fsdp:FsdpTrainer"
    with pytest.raises(LookupError, match="NOTHING"):
        registry_names("slimecli.errors", "NOTHING")


def test_what_is_read_is_what_is_imported():
    import importlib

    for module, variable in (
        ("slimecli.algos", "ALGORITHMS"),
        ("slimecli.trainers", "TRAINERS"),
        ("slimecli.data_tools.rewards", "REWARDS"),
        ("slimecli.data_tools.filters", "FILTERS"),
        ("slimecli.data_tools.sources", "SOURCES"),
        ("slimecli.data_tools.demonstrations", "DEMONSTRATIONS"),
    ):
        assert registry_entries(module, variable) == getattr(importlib.import_module(module), variable)


def test_a_package_is_searched_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "heavy_package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "heavy_package" / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text("def keep(args, samples): return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module_file("heavy_package.inner.hooks") == package / "hooks.py"
    assert hook_problem("heavy_package.inner.hooks:keep") == ""
    assert hook_problem("heavy_package.inner.hooks.keep") == ""
    assert "defines no 'kept' (did you mean 'keep'?)" in hook_problem("heavy_package.inner.hooks:kept")
    assert "heavy_package" not in sys.modules


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_static.py").write_text("score = lambda args, sample: 1.0\n")
    assert hook_problem("mine_static:score") == ""
    assert hook_problem("mine_static.py:score") == ""


@pytest.mark.parametrize("spec", ["score", "file.py", "a:", ":f", "a:b-c"])
def test_what_is_no_name_of_a_function(spec):
    assert hook_problem(spec)


def test_syntax_errors_are_named_with_their_line(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("a = 1\ndef f(:\n")
    assert f"{path}:2" in hook_problem(f"{path}:f")


def test_conditional_and_imported_names_count(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from json import dumps as d\ntry:\n    import a\nexcept ImportError:\n    def f(): ...\nx: int = 1\n"
    )
    assert top_names(path) >= {"d", "f", "x"}
