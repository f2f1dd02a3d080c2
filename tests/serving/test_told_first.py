"""What cannot work is told before an engine loads a model, which may take minutes."""

import socket

import pytest

from tests.forked import slime
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def no_engine(monkeypatch):
    """Loading a model ends the command with words of its own."""

    def load(*args, **kwargs):
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("slimecli.serving.fleet.open_embedded", load)
    monkeypatch.setattr("slimecli.serving.fleet.EmbeddedWorker", load)


def test_replicas_without_a_router(model, no_engine, tmp_path):
    words = ("serve", "--model", str(model), "--replicas", "2", "--router", "none", "--port", "0")
    ended = slime(*words, folder=tmp_path, timeout_s=30)
    assert ended.code == 2 and ended.out == "", ended.err
    assert "2 replicas behind one address need a router, but engine.router = 'none'" in ended.err
    assert "fix: --router auto, or --replicas 1" in ended.err


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_port_that_is_taken(model, no_engine, tmp_path, replicas):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("serve", "--model", str(model), "--replicas", replicas, "--port", str(port))
        ended = slime(*words, folder=tmp_path, timeout_s=30)
    assert ended.code == 1 and ended.out == "", ended.err
    assert f"port {port} on 127.0.0.1 is in use\n  fix: stop who uses it, or take --port 0" in ended.err
