"""Shared by all tests: one thread per process, offline hub, plain output."""

from __future__ import annotations

import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", NO_COLOR="1", RAY_USAGE_STATS_ENABLED="0", COLUMNS="160")

from slimecli import env

env.set_threads(1)
env.quiet_libraries()


@pytest.fixture
def runs_root(tmp_path, monkeypatch):
    """An empty SLIME_RUNS folder."""
    monkeypatch.setenv("SLIME_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"
