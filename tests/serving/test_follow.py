"""Weights that follow a run: newer ones only, whatever happens to their folders, while requests go on."""

import asyncio
import errno
import os
import shutil
import socket
import subprocess

import pytest

from slimecli import files
from slimecli.engines.embedded.weights import FolderWeights
from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir
from slimecli.serving.fleet import LocalFleet
from slimecli.serving.follow import Follower
from slimecli.weights.fingerprint import fingerprint
from tests.models import tiny_model

RECIPE = load_recipe(overrides=("engine.slots=4", "engine.max_context=256"))


def commit(run, version, *, seed, claim=""):
    """Weights of a step, as a run commits them."""
    run.weights_dir(version).parent.mkdir(parents=True, exist_ok=True)
    notes = {"version": version}
    with files.committed_folder(run.weights_dir(version), notes) as folder:
        tiny_model(folder, seed=seed)
        notes["fingerprint"] = claim or fingerprint(FolderWeights(folder).tensors())
    return notes["fingerprint"]


@pytest.fixture
def following(tmp_path):
    run = RunDir(tmp_path / "run")
    run.live_dir.mkdir(parents=True)
    fleet = LocalFleet(RECIPE, tiny_model(tmp_path / "model", seed=0))
    yield run, fleet, Follower(run, fleet, version=0, timeout_s=60)
    asyncio.run(fleet.close())


def test_the_newest_is_taken_under_a_running_request_which_says_so_per_token(following):
    run, fleet, follower = following

    async def work():
        ask = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
        payload = {"input_ids": [5, 6], "sampling_params": ask, "return_logprob": True}
        request = asyncio.create_task(fleet.engine.generate(payload))
        while not fleet.engine.info()["running"]:
            await asyncio.sleep(0.01)
        commit(run, 1, seed=1)
        mark = commit(run, 2, seed=2)
        assert await follower.look() and follower.version == 2
        assert await fleet.engine.fingerprint() == mark
        return await request

    reply = asyncio.run(work())
    spans = reply["meta_info"]["weight_versions"]
    assert len(reply["output_ids"]) == 150 and reply["meta_info"]["finish_reason"]["type"] == "length"
    assert [s["version"] for s in spans] == ["0", "2"] and spans[0]["end"] == spans[1]["start"] > 0
    assert not asyncio.run(follower.look()), "nothing new"


def test_pruned_half_written_and_older_folders_change_nothing(following, monkeypatch):
    run, fleet, follower = following
    commit(run, 4, seed=4)
    assert asyncio.run(follower.look())
    commit(run, 3, seed=3)
    assert not asyncio.run(follower.look()) and fleet.engine.info()["weight_version"] == "4"
    (run.weights_dir(6)).mkdir()
    (run.weights_dir(6) / "model.safetensors").write_bytes(b"half")
    assert not asyncio.run(follower.look())
    shutil.rmtree(run.weights_dir(6))
    commit(run, 7, seed=7)
    link = follower._linked

    def prune_first(version):
        (run.weights_dir(version) / "model.safetensors").unlink()
        return link(version)

    monkeypatch.setattr(follower, "_linked", prune_first)
    assert not asyncio.run(follower.look()) and fleet.engine.info()["weight_version"] == "4"
    monkeypatch.undo()
    shutil.rmtree(run.weights_dir(7))
    mark = commit(run, 8, seed=8)
    update = fleet.update

    async def prune_then_load(what):
        shutil.rmtree(run.weights_dir(8))
        return await update(what)

    monkeypatch.setattr(fleet, "update", prune_then_load)
    assert asyncio.run(follower.look()), "the links stay whole"
    assert asyncio.run(fleet.engine.fingerprint()) == mark


def test_the_same_step_made_anew_is_taken_and_wrong_weights_are_left_out(following, capsys):
    run, fleet, follower = following
    commit(run, 1, seed=1)
    assert asyncio.run(follower.look())
    mark = commit(run, 1, seed=9)
    assert asyncio.run(follower.look()) and asyncio.run(fleet.engine.fingerprint()) == mark
    commit(run, 2, seed=2, claim="0" * 32)
    assert not asyncio.run(follower.look()) and not asyncio.run(follower.look())
    told = capsys.readouterr().err
    assert told.count("weights of step 2 have fingerprint") == 1 and f"not {'0' * 32}: damaged" in told
    assert follower.version == 1 and asyncio.run(fleet.engine.fingerprint()) == mark, "no engine was touched"


def test_damaged_newer_weights_do_not_hide_older_whole_ones(following, capsys):
    run, fleet, follower = following
    mark = commit(run, 3, seed=3)
    for version, damage in ((4, "{"), (5, "[]")):
        commit(run, version, seed=version)
        (run.weights_dir(version) / files.DONE).write_text(damage)
    commit(run, 6, seed=6)
    os.truncate(run.weights_dir(6) / "model.safetensors", 100)
    assert asyncio.run(follower.look()) and follower.version == 3
    assert not asyncio.run(follower.look()) and asyncio.run(fleet.engine.fingerprint()) == mark
    told = capsys.readouterr().err
    assert [told.count(f"weights of step {v} are not whole") for v in (4, 5, 6)] == [1, 1, 1], told
    mark = commit(run, 6, seed=7)
    assert asyncio.run(follower.look()) and asyncio.run(fleet.engine.fingerprint()) == mark, "made anew"


def test_a_run_that_is_gone_is_told_once_and_serving_goes_on(following, capsys, monkeypatch):
    run, fleet, follower = following
    monkeypatch.setattr("slimecli.serving.follow.RETRY_S", 0.01)
    shutil.rmtree(run.root)

    async def work():
        watching = asyncio.ensure_future(follower.watch())
        await asyncio.sleep(0.3)
        assert not watching.done() and not run.root.exists()
        ask = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        assert len((await fleet.engine.generate(ask))["output_ids"]) == 2
        mark = commit(run, 1, seed=1)
        while follower.version != 1:
            await asyncio.sleep(0.01)
        watching.cancel()
        return mark

    assert asyncio.run(work()) == asyncio.run(fleet.engine.fingerprint())
    assert capsys.readouterr().err.count("is gone; step 0 is served on") == 1


def test_an_update_that_fails_again_and_again_leaves_nothing_on_the_disk(following, monkeypatch):
    run, fleet, follower = following
    commit(run, 1, seed=1)
    update = fleet.update

    async def refuse(what):
        raise SlimeError("the engine is busy")

    monkeypatch.setattr(fleet, "update", refuse)
    for _ in range(3):
        with pytest.raises(SlimeError, match="busy"):
            asyncio.run(follower.look())
    assert list(follower._links.iterdir()) == []
    monkeypatch.setattr(fleet, "update", update)
    assert asyncio.run(follower.look()) and len(list(follower._links.iterdir())) == 1


def test_a_copy_that_fails_leaves_nothing_on_the_disk(following, monkeypatch):
    run, _, follower = following
    commit(run, 1, seed=1)

    def full(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slimecli.serving.follow._link", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            asyncio.run(follower.look())
    assert list(follower._links.iterdir()) == []


def test_what_a_killed_server_kept_is_removed_by_the_next_one(following):
    run, fleet, follower = following
    commit(run, 1, seed=1)
    assert asyncio.run(follower.look())
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = follower._links.with_name(follower._links.name.replace(str(os.getpid()), str(gone.pid)))
    elsewhere = left.with_name(left.name.replace(socket.gethostname(), "another-machine"))
    for place in (left, elsewhere):
        shutil.copytree(follower._links, place)
    Follower(run, fleet, version=1, timeout_s=60)
    assert [p.exists() for p in (left, elsewhere, follower._links)] == [False, True, True]
    run.new_attempt()
    assert elsewhere.exists(), "a run knows the processes of its own machine only"


def test_another_run_is_followed_from_its_beginning(following):
    run, fleet, _ = following
    commit(run, 2, seed=2)
    follower = Follower(run, fleet, version=-1, timeout_s=60)
    assert asyncio.run(follower.look()) and fleet.engine.info()["weight_version"] == "2"
