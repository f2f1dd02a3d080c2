import json
import subprocess

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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("slime ru", ["run", "runs"]),
        ("slime run --run ", ["alpha", "runs"]),
        ("slime run -r al", ["alpha"]),
        ("slime --debug run --re", ["--recipe", "--resume"]),
        ("slime init --from quick", ["quickstart"]),
        ("slime convert --from quick", []),
        ("slime plan --set trainer.lr", ["trainer.lr=", "trainer.lr_schedule="]),
        ("slime reward ch", ["check"]),
        ("slime reward check pro", ["prompts.jsonl"]),
        ("slime rollout --prompts pro", ["prompts.jsonl"]),
    ],
)
def test_bash_completes(tmp_path, line, expected):
    (tmp_path / "runs" / "alpha").mkdir(parents=True)
    (tmp_path / "runs" / "alpha" / "run.json").touch()
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "slime.bash").write_text(SCRIPTS["bash"](collect_words()))
    words = line.split(" ")
    typed = f"COMP_WORDS=({' '.join(words)} {repr('') * (not words[-1])}); COMP_CWORD={len(words) - 1}"
    script = f"compopt() {{ :; }}; source ./slime.bash; {typed}; _slime; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(ended.stdout.split()) == expected and not ended.stderr


def test_fish_knows_what_takes_a_file_and_what_takes_none():
    lines = SCRIPTS["fish"](collect_words()).splitlines()

    def after(command, flag):
        (line,) = [
            x for x in lines if x.startswith(f"complete -c slime -n '__fish_seen_subcommand_from {command}' {flag}")
        ]
        return line.partition(f"' {flag}")[2]

    assert after("rollout", "-l prompts") == " -r -F" == after("convert", "-l from")
    assert after("convert", "-l to") == " -x -a 'torch_dist hf'"
    assert after("run", "-l resume") == "" and after("serve", "-l port") == " -x -a ''"
    assert "complete -c slime -n '__fish_seen_subcommand_from recipes reward' -F" in lines


def test_all_are_written_at_once(tmp_path, capsys):
    assert run(["completions", "--write", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slime.bash", "slime.fish", "slime.zsh"]


def test_an_unknown_shell_is_a_usage_error(capsys):
    assert run(["completions", "fsh"]) == 2
    assert "did you mean 'fish'?" in capsys.readouterr().err
