"""The scripts in completions/ are what the command line generates today, and bash accepts them."""

import shutil
import subprocess

import pytest

from slimecli.commands.completions import SCRIPTS, collect_words
from tests.architecture.sources import ROOT


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completions_are_current(shell):
    stored = (ROOT / "completions" / f"slime.{shell}").read_text(encoding="utf-8")
    assert stored == SCRIPTS[shell](collect_words()), "run `slime completions --write completions`"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_shells_accept_their_script(shell):
    script = ROOT / "completions" / f"slime.{shell}"
    if shutil.which(shell) is None:
        assert script.read_text(encoding="utf-8").count("slime") > 5
        return
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def complete(line: str, tmp_path) -> list[str]:
    words = line.split(" ")
    code = (
        f"source {ROOT}/completions/slime.bash; COMP_WORDS=({' '.join(repr(w) for w in words)}); "
        f"COMP_CWORD={len(words) - 1}; compopt() {{ :; }}; _slime; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_runs_recipes_and_fields(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text("{}")
    assert complete("slime pl", tmp_path) == ["plan"]
    assert "--resume" in complete("slime run --res", tmp_path)
    assert complete("slime watch --run fi", tmp_path) == ["first"]
    assert complete("slime plan --recipe quick", tmp_path) == ["quickstart"]
    assert complete("slime plan --set trainer.warm", tmp_path) == ["trainer.warmup_steps="]
    assert set(complete("slime recipes ", tmp_path)) >= {"show", "copy", "quickstart"}
