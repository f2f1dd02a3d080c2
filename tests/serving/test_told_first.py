"""What cannot work is told before an engine loads a model, which may take minutes."""

import os
import socket

import pytest

from slimecli.commands import serve
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir, create_run
from slimecli.serving.front import Serving
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


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `slime serve` of run `talk` at step 3 hands on."""
    for name in ("talk", "other"):
        run = create_run(str(tmp_path / name), load_recipe(overrides=(f"rollout.temperature={0.5 + len(name) / 10}",)))
        run.weights_dir(3).mkdir(parents=True)
    found = {}
    monkeypatch.setattr(serve, "serve", lambda recipe, weights, **more: found.update(more, recipe=recipe))
    monkeypatch.setattr("slimecli.session.step_weights", lambda run, recipe, version: run.weights_dir(version))

    def ask(**more):
        found.clear()
        serve.cli(**{name: str(tmp_path / value) if name != "step" else value for name, value in more.items()})
        return found

    return ask


def test_a_run_is_followed_from_the_step_that_is_served_another_one_from_its_beginning(asked, tmp_path):
    talk, other = RunDir(tmp_path / "talk"), RunDir(tmp_path / "x" / ".." / "other")
    (tmp_path / "x").mkdir()
    more = {"recipe": load_recipe(), "learner": load_recipe(), "version": 3, "logs": tmp_path, "port": 0}
    assert Serving(weights=talk.weights_dir(3), follow=talk, **more).follow_from == 3
    assert Serving(weights=(tmp_path / "other" / "weights" / "v000003"), follow=other, **more).follow_from == 3
    assert Serving(weights=talk.weights_dir(3), follow=other, **more).follow_from == -1


def test_recorded_answers_are_sampled_as_the_run_says_that_learns_from_them(asked, tmp_path, capsys):
    assert asked(run="talk", step=3, record="talk")["learner"].rollout.temperature == pytest.approx(0.9)
    assert "cannot tell how old" not in capsys.readouterr().err
    found = asked(run="talk", step=3, record="other")
    assert found["learner"].rollout.temperature == pytest.approx(1.0)
    assert found["recipe"].rollout.temperature == pytest.approx(0.9)
    assert "run other is to learn from what run talk says" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--model", "MODEL", "--step", "3"), "--step has no effect with --model"),
        (("--run", "talk", "--recipe", "quickstart"), "--recipe has no effect with --run"),
    ],
)
def test_what_would_have_no_effect(model, no_engine, tmp_path, words, reason):
    create_run(str(tmp_path / "talk"), load_recipe())
    words = [{"MODEL": str(model), "talk": str(tmp_path / "talk")}.get(word, word) for word in words]
    ended = slime("serve", *words, "--port", "0", folder=tmp_path, timeout_s=30)
    assert ended.code == 2 and reason in " ".join(ended.err.split())


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_port_that_is_taken(model, no_engine, tmp_path, replicas):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("serve", "--model", str(model), "--replicas", replicas, "--port", str(port))
        ended = slime(*words, folder=tmp_path, timeout_s=30)
    assert ended.code == 1 and ended.out == "", ended.err
    assert f"port {port} on 127.0.0.1 is in use\n  fix: stop who uses it, or take --port 0" in ended.err
