"""GPUs that a run asks for, and what each of them holds."""

import dataclasses
import sys

import pytest

from slimecli import plan
from slimecli.model_specs import get_spec
from slimecli.plan_gpus import GPU_MEMORY, gpu_problems, gpu_values
from slimecli.plan_machine import this_machine
from slimecli.plan_numbers import Value
from slimecli.recipe import load_recipe
from tests.engines.sglang import made

GB = 10**9
TRAINER = [
    Value(group="t", name=n, value=v * GB, unit="bytes", reason="")
    for n, v in (("weights", 4), ("gradients", 4), ("optimizer", 8), ("libraries", 1), ("total", 17))
]
ENGINE = [
    Value(group="e", name=n, value=v * GB, unit="bytes", reason="")
    for n, v in (("weights", 2), ("KV cache, at most", 7), ("libraries", 1), ("total", 10))
]
TP2 = ("trainer.backend=megatron", "megatron.tensor-model-parallel-size=2")
EIGHT = ("trainer.processes=4", *TP2, "engine.replicas=4")


def phases(gpus, *overrides, model="qwen3-0.6b"):
    values = gpu_values(load_recipe("", overrides), gpus, TRAINER, ENGINE, get_spec(model))
    return {v.name: int(v.value) / GB for v in values if v.group == GPU_MEMORY}


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, EIGHT, ""),
        (8, EIGHT, ""),
        (4, EIGHT, ""),
        (3, EIGHT, "asks for 4 GPUs (4 for the trainer, 4 for engines, shared in turn), this machine has 3"),
        (4, (*EIGHT, "cluster.placement=disaggregated"), "take `cluster.placement` = 'colocated'"),
        (4, (*EIGHT, "rollout.max_staleness=1"), "take `rollout.max_staleness` = 0"),
        (8, (*EIGHT, "rollout.max_staleness=1"), ""),
        (4, (*EIGHT, "cluster.address=x:1"), ""),
        (1, (), ""),
    ],
)
def test_more_than_there_are_is_a_problem(gpus, overrides, expected):
    found = gpu_problems(load_recipe("", overrides), gpus)
    assert bool(found) == bool(expected)
    assert expected in "".join(found)


def test_gpus_that_are_shared_hold_one_at_a_time():
    assert phases(1) == {"learn": 16, "generate": 9, "publish": 14}
    assert phases(2) == {"trainer's": 16, "engine's": 9}
    assert phases(1, "steps=0") == {"learn": 16}
    assert phases(0) == {} != phases(0, "cluster.address=x:1")


def test_an_engine_on_several_gpus_has_its_share_on_each():
    sglang = ("engine.backend=sglang", "sglang.tp_size=2")
    assert phases(1, *sglang)["generate"] == 4.5, "two tensor-parallel ranks"
    assert phases(1, *sglang)["publish"] == 13
    assert phases(8, *sglang, "sglang.pp_size=2")["engine's"] == 2.25
    assert phases(1, *sglang[:1], "sglang.tp=16")["generate"] == pytest.approx(2 / 16 + 7 / 8), "8 heads of the cache"
    assert phases(1, *sglang, model="deepseek-v3")["generate"] == 8, "latent attention: the cache is whole on each"
    group = "[{replicas = 1, sglang = {tp_size = 4}}, {replicas = 1}]"
    assert phases(1, *sglang, f"engine.groups={group}")["generate"] == 4.5, "the one with the fewest"


def test_the_plan_says_what_servers_are_told_where_gpus_are_shared(monkeypatch, tmp_path):
    made_up = made.installation(tmp_path, sys.executable)
    machine = this_machine(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}", "label": "{i}"}}\n' for i in range(64)))
    given = ("engine.backend=sglang", f"engine.python='{made_up}'", f"data.train='{rows}'")
    for gpus, told in ((1, True), (2, False)):
        monkeypatch.setattr(plan, "this_machine", lambda _, n=gpus: dataclasses.replace(
            machine, gpus=n, gpu_memory_bytes=80 * GB, disk_free_bytes=10**15))  # fmt: skip
        found = plan.make_plan(load_recipe("", ("model.name=qwen3-0.6b", *given)))
        assert ("enable_memory_saver" in [v.name for v in found.values if v.group == "sglang"]) is told


def test_what_lasts_is_there_while_weights_are_published_and_what_waits_in_host_memory_is_not():
    """A critic, and Megatron's gradient buffers; host memory has rows of the same names."""
    more = [Value(group="t", name="critic", value=3 * GB, unit="bytes", reason="")]
    host = [Value(group="h", name=n, value=50 * GB, unit="bytes", reason="") for n in ("critic", "optimizer", "total")]
    for overrides, trainer, published in (
        ((), TRAINER, 14),
        (("trainer.backend=megatron",), TRAINER, 18),
        (("trainer.backend=megatron",), more + TRAINER, 21),
        (("trainer.backend=megatron",), TRAINER + host, 18),
    ):
        values = gpu_values(load_recipe("", overrides), 1, trainer, ENGINE, get_spec("qwen3-0.6b"))
        found = {v.name: int(v.value) / GB for v in values if v.group == GPU_MEMORY}
        assert found == {"learn": 16, "generate": 9, "publish": published}


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, ("algo.name=ppo",), "and so does algo.critic_offload = true"),
        (1, ("algo.name=ppo", "algo.critic_offload=true"), ""),
        (1, (), ""),
        (0, ("algo.name=ppo", "algo.critic_offload=true"), "without one it only copies"),
        (0, ("algo.name=ppo",), ""),
    ],
)
def test_the_plan_says_when_to_let_policy_and_critic_take_turns(monkeypatch, tmp_path, gpus, overrides, expected):
    machine = this_machine(tmp_path)
    small = type(machine)(**{**vars(machine), "gpus": gpus, "gpu_memory_bytes": 10**6 * gpus})
    monkeypatch.setattr(plan, "this_machine", lambda folder: small)
    made = plan.make_plan(load_recipe("quickstart", ("trainer.backend=megatron", *overrides)))
    found = [w for w in made.warnings if "critic_offload" in w]
    assert bool(found) == bool(expected) and expected in "".join(found)
    if gpus:
        (learn,) = [v.value for v in made.values if (v.group, v.name) == ("memory by phase", "learn")]
        assert learn > made.value("memory of a trainer process", "total")


def test_the_plan_shows_bundles_and_warns_of_a_small_gpu(monkeypatch, tmp_path):
    machine = this_machine(tmp_path)
    small = type(machine)(**{**vars(machine), "gpus": 1, "gpu_memory_bytes": 10**6})
    monkeypatch.setattr(plan, "this_machine", lambda folder: small)
    made = plan.make_plan(load_recipe("quickstart"))
    assert made.value("placement", "GPUs") == 1
    assert any("of GPU memory may be needed at a time" in w for w in made.warnings)
