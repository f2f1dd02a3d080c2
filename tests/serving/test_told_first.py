"""What cannot work is told before an engine loads a model, which may take minutes."""

import os
import socket

import pytest

from slimecli.commands import serve
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.serving.store import recording
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


def test_a_folder_that_another_server_records_into(model, no_engine, tmp_path):
    run = create_run(str(tmp_path / "talk"), load_recipe())
    with recording(run.live_dir):
        words = ("serve", "--model", str(model), "--record", str(run.root), "--port", "0")
        ended = slime(*words, folder=tmp_path, timeout_s=30)
    assert ended.code == 1 and ended.out == "", ended.err
    assert f"is being recorded into by process {os.getpid()}" in ended.err


def test_a_run_may_stand_where_a_model_does(monkeypatch, tmp_path):
    run = create_run(str(tmp_path / "talk"), load_recipe())
    (run.weights_dir(3)).mkdir(parents=True)
    served = []
    monkeypatch.setattr(serve, "serve", lambda recipe, weights, **more: served.append((weights, more["version"])))
    monkeypatch.setattr("slimecli.session.step_weights", lambda run, recipe, version: run.weights_dir(version))
    serve.cli(model=str(run.root), step=3)
    assert served == [(run.weights_dir(3), 3)]


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_port_that_is_taken(model, no_engine, tmp_path, replicas):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("serve", "--model", str(model), "--replicas", replicas, "--port", str(port))
        ended = slime(*words, folder=tmp_path, timeout_s=30)
    assert ended.code == 1 and ended.out == "", ended.err
    assert f"port {port} on 127.0.0.1 is in use\n  fix: stop who uses it, or take --port 0" in ended.err
