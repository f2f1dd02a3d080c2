"""Every benchmark runs in its smallest size and prints one JSON line; the figures themselves are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli import env

pytestmark = pytest.mark.timeout(1000)  # whole runs, one after the other, on whatever machine this is
ROOT = Path(__file__).resolve().parent.parent


def smoke(name, *flags, called=""):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env=env.child_env(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "stdout is one JSON line; tables go to stderr"
    result = json.loads(lines[0])
    assert result["benchmark"] == (called or name)
    assert result["machine"]["cores"] >= 1
    assert len(result["machine"]["load_average"]) == 3
    return result, done.stderr


@pytest.mark.parametrize(
    ("name", "flags", "called"),
    [
        ("decode", (), ""),
        ("train_throughput", (), ""),
        ("train_throughput", ("--backend", "megatron"), "train_throughput_megatron"),
    ],
)
def test_throughput(name, flags, called):
    result, table = smoke(name, *flags, called=called)
    assert result["ratio"] > 0
    only = result["results"][0]
    assert 0 < only["model_flops_utilisation"] < 1
    assert all(side["tokens_per_s"] > 0 and side["tokens_per_cpu_s"] > 0 for side in only["sides"].values())
    assert "quickstart" in table


def test_overlap():
    result, table = smoke("overlap")
    assert result["sides"]["in turns"]["staleness_max"] == 0
    assert [result["sides"][f"{s} ahead"]["staleness_max"] for s in (1, 2)] == [1, 2]
    assert result["sides"]["never stopping, 2"]["staleness_max"] <= 2 and "of_turns" in table


def test_learning():
    result, table = smoke("learning")
    assert [row["setting"] for row in result["settings"]] == ["grpo", "ppo"]
    assert all(0 <= row["end"] <= 1 and len(row["ends"]) == result["seeds"] == 1 for row in result["settings"])
    assert "grpo" in table


def test_the_step_of_the_goal_is_the_first_one():
    from benchmarks.learning import summarise

    curve = {"0": 0.7, "10": 0.9, "100": 0.95, "20": 0.91}
    late = {"0": 0.7, "10": 0.8, "100": 0.95, "20": 0.91}
    never = dict.fromkeys(curve, 0.5)
    found = summarise("grpo", [{"curve": c, "cpu_s": 1.0} for c in (curve, late, never)], 100)
    assert found["step of the goal"] == [10, 20, None] and not found["learnt"]


def test_sync():
    result, _ = smoke("sync")
    kinds = result["shapes"]["quickstart"]["kinds"]
    assert set(kinds) == {"copy", "in_process", "shared_memory", "tensor", "distributed", "disk", "disk_delta"}
    assert 0 < kinds["disk_delta"]["bytes_sent"] < 0.2 * kinds["disk"]["bytes_sent"]
    assert result["ratio"] > 1, "a sync cannot be quicker than a plain copy of the same bytes"


def test_convert():
    """Without Megatron's Python there is no model to instantiate, and the result says so."""
    result, table = smoke("convert")
    assert result["compared"] is False and result["memory_of_instantiating"] is None
    ours = {"to torch_dist, unverified", "to torch_dist", "to hf, unverified", "to hf"}
    assert set(result["sides"]) == {"copy", "direct copy"} | ours
    assert all(side["seconds"] > 0 and side["peak_gb"] < 1.0 for side in result["sides"].values())
    assert result["ratio"] == min(result["sides"][name]["of_copy_speed"] for name in ours)
    assert "to torch_dist" in table


def test_cli_startup():
    result, _ = smoke("cli_startup")
    assert result["against"] == "python -c pass"
    assert 0 < result["ratio"] < 1, "slime starts slower than a bare Python"
    assert result["commands"]["slime --help"]["cpu_seconds"] > 0


def test_grpo_step():
    """Without TRL there is nothing to compare with, and the result says so."""
    result, _ = smoke("grpo_step")
    assert result["compared"] is False
    assert result["ratio"] is None
    assert result["sides"]["slime"]["seconds_per_step"] > 0
    assert 0 < result["sides"]["slime"]["response_length"] <= 24


def test_engine_vs_sglang():
    """Without SGLang the other two sides are measured, and the result says so."""
    result, _ = smoke("engine_vs_sglang")
    assert result["compared"] is False and result["against"] == "transformers generate"
    (quickstart,) = result["results"]
    assert quickstart["sides"].keys() == {"slime", "transformers"}
    assert all(side["tokens_per_cpu_s"] > 0 for side in quickstart["sides"].values())


def test_stored_results_are_complete():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert result["benchmark"] == path.stem
        assert result["ratio"] > 0
        assert {"cores", "cpu", "torch", "load_average", "date"} <= set(result["machine"])


def test_the_stored_learning_curves_are_of_every_setting():
    from benchmarks.learning import GOAL, SETTINGS, STEPS

    result = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text())
    assert (result["goal"], result["steps"], result["seeds"]) == (GOAL, STEPS, 3)
    assert [row["setting"] for row in result["settings"]] == list(SETTINGS)
    assert all(len(row["ends"]) == 3 and row["learnt"] == (min(row["ends"]) >= GOAL) for row in result["settings"])


def test_trees_of_processes_are_summed():
    from benchmarks._common import tree_cpu_seconds

    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(1, flush=True)\nimport sys; sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert tree_cpu_seconds(process.pid) >= 0.4
        process.stdin.close()


def test_router():
    result, table = smoke("router")
    assert {"direct", "builtin round_robin", "builtin cache_aware"} <= set(result["sides"])
    assert all(side["requests_per_s"] > 0 and side["ms_p99"] >= side["ms_p50"] for side in result["sides"].values())
    assert result["sides"]["builtin round_robin"]["cpu_us_per_request"] > 0 and "builtin cache_aware" in table
