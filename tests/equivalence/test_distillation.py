"""On-policy distillation through the command line: a teacher behind a server, and one that the trainer holds."""

import json
import subprocess
import sys

import pytest
import torch

from slimecli import env
from slimecli.weights.convert import hf_to_torch_dist
from tests.equivalence.test_layouts import SMOOTH
from tests.forked import slime, spawn_slime, succeed
from tests.tiny_run import assert_same_weights, metrics, sets, weights

STEPS = 2


def run(folder, *extra):
    succeed("run", "--recipe", "quickstart", "--run", "r", *sets(f"steps={STEPS}", *SMOOTH, *extra), folder=folder)
    return folder / "runs" / "r"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The weights that every run here starts from: a teacher of the policy's own mind."""
    return run(tmp_path_factory.mktemp("start"), "steps=0") / "export"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run without a teacher."""
    return run(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def served(start):
    command = [sys.executable, "-m", "slimecli.engines.embedded", "--model", str(start), "--max-context", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env.child_env())
    yield json.loads(process.stdout.readline())["url"]
    process.terminate()
    process.wait(30)


def gaps(made):
    return [record["train/teacher_kl"] for record in metrics(made) if "train/teacher_kl" in record]


def test_a_served_teacher_says_what_the_policy_says_until_they_part(plain, served, tmp_path):
    made = run(tmp_path, f"distill.url='{served}'")
    first, second = gaps(made)
    assert abs(first) < 1e-5 < abs(second), "the same weights give the same log-probs, at the same places"
    for name, value in weights(plain / "weights/v000001").items():
        torch.testing.assert_close(weights(made / "weights/v000001")[name], value, atol=2e-5, rtol=1e-3)


def test_a_teacher_alone_moves_nothing_while_it_agrees(served, tmp_path):
    made = run(tmp_path, f"distill.url='{served}'", "distill.only=true")
    first = next(record for record in metrics(made) if record["step"] == 1)
    assert first["rollout/reward"] > 0 and first["train/grad_norm"] < 1e-4


def test_a_teacher_beside_the_trainer_is_the_served_one(start, served, tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = run(tmp_path / "here", f"distill.teacher='{start}'")
    there = run(tmp_path / "there", f"distill.url='{served}'")
    assert gaps(here)[0] == 0.0
    assert gaps(here)[1] == pytest.approx(gaps(there)[1], rel=1e-3)


@pytest.mark.ray
def test_a_frozen_model_is_served_beside_the_policy(start, tmp_path):
    """Two servers behind a router, and one of a Megatron checkpoint; the run ends with none of them left."""
    hf_to_torch_dist(start, tmp_path / "megatron", jobs=1)
    judge = f"{{name='judge', path='{tmp_path}/megatron', max_context=64}}"
    models = f"engine.models=[{{name='teacher', path='{start}', replicas=2, max_context=64}}, {judge}]"
    words = sets(f"steps={STEPS}", *SMOOTH, models, "distill.url='model:teacher'", "cluster.backend='ray'")
    succeed("run", "--recipe", "quickstart", "--run", "r", *words, folder=tmp_path, run=spawn_slime)
    first, second = gaps(tmp_path / "runs/r")
    assert abs(first) < 1e-5 < abs(second)
    assert (tmp_path / "runs/r/logs/attempt_001/teacher_1.log").is_file()
    assert (tmp_path / "runs/r/logs/attempt_001/judge_0.log").is_file()
    assert_same_weights(tmp_path / "runs/r/model/served-judge", start)


def test_a_teacher_that_is_gone_is_named(tmp_path):
    words = sets(f"steps={STEPS}", "distill.url='http://127.0.0.1:9'")
    ended = slime("run", "--recipe", "quickstart", "--run", "r", *words, folder=tmp_path)
    assert ended.code == 1
    assert "teacher: no connection to the engine at http://127.0.0.1:9" in ended.err
