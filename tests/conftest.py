"""Shared by all tests: one thread per process, offline hub, plain output."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", NO_COLOR="1", RAY_USAGE_STATS_ENABLED="0", COLUMNS="160")

from slimecli import env

env.set_threads(1)
env.quiet_libraries()


def pytest_collection_finish():
    """What all test modules imported, hundreds of thousands of objects, is not looked through by every collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """A real SGLang takes minutes to start on a busy machine."""
    for item in items:
        if item.get_closest_marker("sglang") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1000))


@pytest.fixture
def runs_root(tmp_path, monkeypatch):
    """An empty SLIME_RUNS folder."""
    monkeypatch.setenv("SLIME_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def online(tmp_path, monkeypatch):
    """A hub on loopback as the only one there is, with an empty cache; see tests/hub_server.py."""
    from huggingface_hub import constants

    from slimecli.weights import transfer
    from tests.hub_server import running_hub

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
