"""Settings that say how, not what: the result must not depend on them."""

import asyncio
import json

import pytest
import torch

from slimecli.engines.http import HttpEngine
from slimecli.rundir import RunDir
from slimecli.weights.fingerprint import Fingerprint
from tests.engines.processes import start_engine
from tests.forked import slime, spawn_slime, succeed
from tests.tiny_run import assert_same_run, assert_same_weights, metrics, sets, weights

STEPS = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference"))


def run(folder, *extra):
    starter = spawn_slime if "cluster.backend='ray'" in extra else slime
    words = ("run", "--recipe", "quickstart", "--run", "r", *sets(f"steps={STEPS}", *extra))
    succeed(*words, folder=folder, run=starter)
    return folder / "runs" / "r"


@pytest.fixture(scope="module")
def elsewhere(reference):
    """An embedded engine in a process of its own, with the weights of before SFT; every run gives it new ones."""
    engine = start_engine(RunDir(reference).model_dir)
    yield engine
    engine.kill()


def published(folder):
    """(version, fingerprint) of all weights that a run published."""
    return [(m["weights/version"], m["weights/fingerprint"]) for m in metrics(folder) if "weights/version" in m]


def test_the_reference_is_of_one_process(reference):
    """Its engine takes the trainer's own tensors: the kind that all others are compared with."""
    assert RunDir(reference).recipe().sync_kind("local") == "in_process"
    assert [version for version, _ in published(reference)] == [1, 2]
    assert len({mark for _, mark in published(reference)}) == STEPS, "every step has weights of its own"


@pytest.mark.parametrize("kind", ["shared_memory", "tensor", "distributed", "disk", "disk_delta"])
def test_sync_kinds_give_the_same_run_and_the_same_weights_on_the_engine(reference, elsewhere, tmp_path, kind):
    """In process, and by every kind to an engine in another process: samples, versions, fingerprints, weights."""
    other = run(tmp_path, f"sync.kind='{kind}'", f"engine.urls=['{elsewhere.url}']")
    assert_same_run(reference, other, STEPS)
    assert published(other) == published(reference)
    assert_same_weights(reference / "export", other / "export")
    version, fingerprint, digests = asyncio.run(held_by(elsewhere.url))
    mark = Fingerprint()
    for name, tensor in weights(reference / f"weights/v{STEPS:06d}").items():
        mark.update(name, tensor)
    assert (version, fingerprint) == (str(STEPS), mark.hexdigest()) and digests == mark.digests()
    assert (STEPS, fingerprint) == published(reference)[-1]
    perf = [json.loads(line) for line in (other / "perf.jsonl").read_text().splitlines()]
    assert all(p["seconds/sync_stage"] > 0 and p["seconds/sync_push"] >= p["seconds/sync_pause"] > 0 for p in perf)
    full = [p["sync/full"] for p in perf]
    assert full == [0 if kind == "disk_delta" else 1] * STEPS, "who holds the weights of step 0 can follow"
    total = metrics(other)[-1]["weights/bytes"]
    assert perf[-1]["sync/bytes"] < total if kind == "disk_delta" else perf[-1]["sync/bytes"] == total
    assert not (other / "sync").exists(), "weights on their way are gone with the run"


async def held_by(url):
    """(version, fingerprint, digest per weight) that an engine says of its live weights."""
    client = HttpEngine(url, timeout_s=30)
    info = await client.info()
    told = (info["weight_version"], await client.fingerprint(), await client.digests())
    await client.close()
    return told


def test_engine_slots_do_not_change_answers(reference, tmp_path):
    assert_same_run(reference, run(tmp_path, "engine.slots=3"), STEPS)


@pytest.mark.ray
def test_ray_with_two_engines_equals_one_process(reference, tmp_path):
    """Broadcast to both; the other Ray runs go through shared memory."""
    other = run(tmp_path, "cluster.backend='ray'", "engine.replicas=2", "sync.kind='distributed'")
    assert_same_run(reference, other, STEPS)


def assert_close_run(a, b):
    """Equal up to the order of float32 additions: one optimizer step turns 1e-7 of gradient noise into far less than
    lr = 4e-4 of weight, except where Adam's second moment is as small as the noise."""
    left, right = (weights(r / f"weights/v{STEPS:06d}") for r in (a, b))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)
        assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-3)
        assert one["train/tokens"] == two["train/tokens"]


SMOOTH = ("trainer.adam_eps=1e-3", "sft.steps=2")
"""a large epsilon keeps Adam from dividing noise by noise"""


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    return run(tmp_path_factory.mktemp("smooth"), *SMOOTH)


@pytest.mark.parametrize("tokens", [40, 100])
def test_micro_batches_do_not_matter(smooth, tmp_path, tokens):
    assert_close_run(smooth, run(tmp_path, *SMOOTH, f"trainer.max_tokens_per_micro_batch={tokens}"))


@pytest.mark.ray
def test_two_trainer_processes_equal_one(smooth, tmp_path):
    assert_close_run(smooth, run(tmp_path, *SMOOTH, "cluster.backend='ray'", "trainer.processes=2"))


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_taking_turns_on_one_device_changes_nothing(reference, tmp_path, backend):
    """Engines lose their weights and the trainer its memory in every step."""
    folder = run(tmp_path, "cluster.placement='colocated'", f"cluster.backend='{backend}'")
    assert_same_run(reference, folder, STEPS)
    timing = (folder / "perf.jsonl").read_text(encoding="utf-8")
    assert timing.count('"seconds/turns"') >= STEPS
