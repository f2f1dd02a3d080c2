import json

import pytest

from slimecli.cli import COMMANDS, run
from slimecli.commands.completions import SCRIPTS, collect_words


def test_words_come_from_the_command_line_itself():
    words = collect_words()
    assert list(words.commands) == list(COMMANDS)
    assert {"--recipe", "--set", "--json", "--help"} <= set(words.options["plan"])
    assert "quickstart" in words.recipes
    assert "trainer.lr=" in words.fields


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_name_every_command_and_option(shell, capsys):
    assert run(["completions", shell]) == 0
    text = capsys.readouterr().out
    words = collect_words()
    for name, flags in words.options.items():
        assert name in text
        for flag in flags:
            assert (flag if shell != "fish" else f" {flag.lstrip('-')}") in text


def test_all_are_written_at_once(tmp_path, capsys):
    assert run(["completions", "--write", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slime.bash", "slime.fish", "slime.zsh"]


def test_an_unknown_shell_is_a_usage_error(capsys):
    assert run(["completions", "fsh"]) == 2
    assert "did you mean 'fish'?" in capsys.readouterr().err
