"""ruff and mypy are part of the suite, so that one command says whether the code is clean."""

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT


def check(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_ruff_check():
    check("ruff", "check", ".")


def test_ruff_format():
    check("ruff", "format", "--check", ".")


@pytest.mark.timeout(1500)
def test_mypy():
    check("mypy")
