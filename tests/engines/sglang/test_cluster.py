"""Whole runs on Ray whose SGLang engines are more than one process each, or of two kinds."""

import asyncio
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from slimecli.ports import free_port
from tests.cluster.test_death import engines_of, start, wait_until
from tests.engines.sglang import made
from tests.forked import spawn_slime, succeed
from tests.tiny_run import even_share, metrics, sets

pytestmark = [pytest.mark.sglang, pytest.mark.ray]
patient = partial(spawn_slime, timeout_s=900)


async def held(args, sample, **kwargs):
    """No step ends while the file `held` lies beside the runs."""
    while (Path(os.environ["SLIME_RUNS"]).parent / "held").exists():
        await asyncio.sleep(0.1)
    return await even_share(args, sample)


def words(python, *more):
    engine = ("engine.backend=sglang", f"engine.python={python}", *made.PATIENT)
    return ("run", "--recipe", "quickstart", "--run", "r", *sets(*engine, "cluster.backend=ray", "steps=2", *more))


def check(run):
    """Both steps were made, with new weights, and the servers computed what the trainer computes."""
    steps = metrics(run)
    assert [s["step"] for s in steps] == [1, 2]
    assert len({s["weights/fingerprint"] for s in steps}) == 2
    assert max(s["train/logprob_gap_max"] for s in steps) < 1e-5


def test_an_engine_over_two_machines(sglang_python, tmp_path):
    """GPUs are only claimed: the trainer has one, and the engine has one on each of two machines."""
    from ray.cluster_utils import Cluster as RayNodes

    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2, num_gpus=1)
        engine = ("sglang.tp_size=2", "cluster.gpus_per_machine=1")
        line = (*words(sglang_python, *engine), "--ray-address", nodes.address)
        succeed(*line, folder=tmp_path, run=patient)
    finally:
        nodes.shutdown()
    run = tmp_path / "runs" / "r"
    check(run)
    for rank, name in enumerate(("engine_0", "engine_0_machine_1")):
        log = (run / "logs" / "latest" / f"{name}.log").read_text()
        assert "'nnodes': 2" in log and f" TP{rank}] " in log and f" TP{1 - rank}] " not in log


def test_prompts_are_computed_by_one_server_and_answers_continued_by_another(sglang_python, tmp_path):
    """Behind a real smg; caches go from one to the other by a real Mooncake, over TCP."""
    door = f"{{disaggregation_bootstrap_port={free_port()}}}"
    groups = f"engine.groups=[{{kind='prefill', sglang={door}}}, {{kind='decode'}}]"
    succeed(*words(sglang_python, groups, "engine.router=smg"), folder=tmp_path, run=patient)
    run = tmp_path / "runs" / "r"
    check(run)
    prefill, decode = ((run / "logs" / "latest" / f"engine_{i}.log").read_text() for i in (0, 1))
    assert "Prefill batch" in prefill and "Decode batch" not in prefill
    assert "Decode batch" in decode and "Prefill batch" not in decode


def test_a_server_that_is_killed_behind_smg_is_replaced_and_has_the_current_weights(sglang_python, tmp_path):
    """The other server answers meanwhile; what the new one answers is what the trainer computes."""
    engine = (
        "engine.backend=sglang",
        f"engine.python={sglang_python}",
        *made.PATIENT,
        "engine.router=smg",
        "engine.health_interval_s=0.5",
    )
    run, root = start(
        tmp_path,
        "r",
        *engine,
        "steps=8",
        "reward.path='tests.engines.sglang.test_cluster:held'",
        "reward.timeout_s=500",
        within_s=600,
    )
    try:
        (tmp_path / "held").touch()
        os.kill(min(engines_of(tmp_path, "slimecli/engines/sglang/")), signal.SIGKILL)
        told = root / "logs" / "latest" / "engines.log"
        wait_until(lambda: run.poll() is not None or (told.exists() and "restarted in" in told.read_text()), 600)
        (tmp_path / "held").unlink()
        said = run.communicate(timeout=600)[1].decode()
    finally:
        run.kill()
    assert run.returncode == 0, said
    line = r"engine (\d) at http://\S+ died \(.*\): restarted in [\d.]+ s at \S+, holds version \d+"
    found = re.search(line, said)
    assert found, said
    _, second, third = (root / "logs" / "latest" / f"engine_{found[1]}.log").read_text().split("server_args=")
    assert "POST /generate" in second and "POST /generate" in third, "both answered, the new one too"
    rows = [json.loads(row) for row in (root / "perf.jsonl").read_text().splitlines()]
    assert sum(row.get("engine/lost", 0) for row in rows) == 1
    steps = metrics(root)
    assert [s["step"] for s in steps] == list(range(1, 9))
    assert max(s["train/logprob_gap_max"] for s in steps) < 1e-5
