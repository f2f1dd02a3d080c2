"""`-` in place of a file: the standard streams where the result is a text, an error where it is none."""

import io
import sys
from types import SimpleNamespace

import pytest

from slimecli.cli import run
from slimecli.commands.init import recipe_text
from slimecli.commands.recipes import show_recipe
from slimecli.observe.report import render_report
from tests.observe.made_run import make_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, runs_root):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "-").exists()


def test_one_text_goes_to_stdout_and_nothing_beside_it(runs_root, capsys):
    made = make_run(runs_root / "demo")
    for words, expected in (
        (["report", "--run", "demo", "--out", "-"], render_report(made)),
        (["init", "--from", "quickstart", "-o", "-"], recipe_text("quickstart", "recipe.toml")),
        (["recipes", "copy", "quickstart", "-"], show_recipe("quickstart")),
    ):
        assert run(words) == 0
        assert capsys.readouterr().out == expected.rstrip("\n") + "\n"
    assert not made.report_path.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--to", "hf", "--from", "x"],
        ["download", "qwen3-0.6b"],
        ["export", "--run", "demo"],
        ["prepare-data", "--recipe", "quickstart"],
        ["completions", "--write", "-"],
        ["report", "--run", "demo", "--bundle", "-"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_or_an_archive_does_not_go_there(words, runs_root, capsys):
    make_run(runs_root / "demo")
    assert run([*words, *(["--out", "-"] if "-" not in words else [])]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "-: the result is a folder or an archive" in told.err
    assert " ./- is one that is called so" in told.err


def test_what_else_would_go_to_stdout_is_refused(runs_root, capsys):
    make_run(runs_root / "demo")
    for words in (["report", "--run", "demo"], ["init"]):
        assert run([*words, "--out", "-", "--json"]) == 2
        assert "--json has no effect where the text itself goes" in capsys.readouterr().err
    assert run(["report", "--run", "demo", "--out", "-", "--bundle", "b.zip"]) == 2
    assert "--bundle has no effect" in capsys.readouterr().err


def test_samples_to_score_come_from_stdin(here, capsys, monkeypatch):
    line = b'{"prompt": "1+1", "response": "\\\\boxed{2}", "label": "2", "tokens": [1, 2], "response_length": 1}\n'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line), isatty=lambda: False))
    assert run(["reward", "score", "-", "--type", "math"]) == 0
    assert '"reward":1' in capsys.readouterr().out.replace(" ", "")
