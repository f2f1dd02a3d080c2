"""What `slime plan` says that a rank holds, against what live ranks hold and against published formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimecli.files import read_json
from slimecli.model_specs import from_config, get_spec
from slimecli.plan_megatron import decided_values, megatron_bytes
from slimecli.recipe import load_recipe
from slimecli.trainers import open_trainer
from slimecli.trainers.megatron.arguments import settings_of
from slimecli.trainers.megatron.layout import Layout
from slimecli.trainers.megatron.shares import critic_parameters, stage_layers, stage_parameters, token_width
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import megatron, world_of
from tests.trainers.processes import run_ranks

TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
SP, ETP1 = "sequence_parallel=true", "expert_tensor_parallel_size=1"
LAYOUTS = [
    ("qwen3", megatron()),
    ("qwen3", megatron(TP2, processes=2)),
    ("qwen3", megatron(TP2, SP, processes=2)),
    ("qwen3", megatron(PP2, VPP2, processes=2)),
    ("qwen3", megatron(PP2, "decoder_first_pipeline_num_layers=1", processes=2)),
    ("qwen2", megatron(TP2, processes=2)),
    ("qwen2", megatron("tensor_model_parallel_size=4", processes=4)),
    ("glm4", megatron(PP2, processes=2)),
    ("minimax_m2", megatron(TP2, SP, processes=2)),
    ("qwen3_moe", megatron(EP2, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("mixtral", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("qwen2_moe", megatron(TP2, SP, processes=2)),
    ("glm4_moe", megatron(PP2, processes=2)),
    ("deepseek_v3", megatron(TP2, SP, processes=2)),
    ("glm4_moe_lite", megatron(processes=2)),
    ("qwen3_next", megatron(TP2, SP, processes=2)),
    ("qwen3_5", megatron(processes=1)),
]


def held(folder, overrides):
    """On one rank: numbers of parameters, gradients, optimizer state; bytes kept for the backward pass of one batch."""
    from megatron.core import parallel_state

    recipe = made.recipe(*overrides, "trainer.max_tokens_per_micro_batch=8192")
    trainer = open_trainer(recipe, folder, total_steps=5)
    batch = made.batch(recipe)
    trainer.step(batch)
    named = [(n, p.numel()) for chunk in trainer._policy.bare for n, p in chunk.named_parameters()]
    optimizers = trainer._policy._optimizer.chained_optimizers
    states = [v for o in optimizers for s in o.optimizer.state.values() for v in s.values()]
    buffers = [b for c in trainer._policy.chunks for b in c.buffers + c.expert_parallel_buffers]
    weights = {p.untyped_storage().data_ptr() for c in trainer._policy.bare for p in c.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.step(batch)
    layout, spec = trainer._settings.layout, trainer._spec
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expected = stage_parameters(spec, layout, stage)
    layers = stage_layers(spec, layout)[stage]
    width = sum(token_width(spec, layout, i, fused=False) for i in layers)
    return {
        "parameters": (sum(n for k, n in named if ".experts." not in k), sum(n for k, n in named if ".experts." in k)),
        "planned": (expected.dense, expected.expert),
        "gradients": sum(b.grad_data.numel() for b in buffers),
        "state": sum(s.numel() for s in states if torch.is_tensor(s)),
        "kept": sum(kept.values()),
        "estimated": 4 * width * batch.num_tokens / (layout.cp * layout.dp),
        "dp": layout.dp * layout.cp,
        "micro_batches": layout.vpp,
        "buckets": sum(len(b.params) for b in buffers),
    }


@pytest.mark.parametrize(("family", "overrides"), LAYOUTS, ids=[f"{f} {' '.join(o[2:])}" for f, o in LAYOUTS])
def test_parameters_are_counted_exactly_and_activations_within_a_quarter(model_of, family, overrides):
    folder = model_of(family, 4 if "pipeline" in str(overrides) else 3)
    for rank in run_ranks(world_of(overrides), held, folder, overrides, join=False):
        assert rank["parameters"] == rank["planned"]
        count = sum(rank["parameters"])
        padding = 128 * rank["buckets"]  # megatron-core starts each parameter at a round place of its buffer
        assert count <= rank["gradients"] <= count + padding
        dp = rank["dp"] if sum(rank["parameters"][1:]) == 0 else 1
        if dp == rank["dp"]:
            assert rank["state"] == pytest.approx(2 * count / dp, abs=2 * padding)
        if rank["micro_batches"] == 1:  # with interleaving a second batch is in flight
            assert rank["kept"] == pytest.approx(rank["estimated"], rel=0.25)


def critic_held(folder, overrides):
    """On one rank: the critic's parameters, counted and planned."""
    from megatron.core import parallel_state

    trainer = open_trainer(made.recipe("algo.name=ppo", *overrides), folder, total_steps=5)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expected = critic_parameters(trainer._spec, trainer._settings.layout, stage)
    return sum(p.numel() for c in trainer._critic.bare for p in c.parameters()), expected.dense + expected.expert


@pytest.mark.parametrize(("family", "layout"), [("qwen3", ()), ("qwen3", PP2), ("llama", TP2), ("qwen3_moe", PP2)])
def test_a_critics_parameters_are_counted_exactly(model_of, family, layout):
    overrides = megatron(layout, processes=2) if layout else megatron()
    for found, planned in run_ranks(world_of(overrides), critic_held, model_of(family, 4), overrides, join=False):
        assert found == planned


def weights_and_optimizer(spec, tp, pp, dp):
    """Bytes of the most loaded shard as Megatron-LM's report has them (bf16 weights, float32 gradients, distributed
    optimizer: 6 + 12 / DP per parameter): layers / PP, and the embedding; both embeddings without a pipeline."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = 2 * spec.hidden * (spec.ffn * 3 / 2 + 1) + 2 * spec.hidden * (q + kv)
    embedding = spec.padded_vocab() * spec.hidden
    ends = embedding * (1 if spec.tied or pp > 1 else 2)
    return ((layer * spec.layers + spec.hidden) / pp + ends) / tp * (6 + 12 / dp)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "dp"), [("qwen3-4b", 2, 1, 4), ("qwen3-32b", 8, 4, 2), ("qwen2.5-7b", 2, 2, 2)]
)
def test_weights_and_optimizer_are_those_of_megatrons_own_report(name, tp, pp, dp):
    spec = get_spec(name)
    sizes = (f"megatron.tensor_model_parallel_size={tp}", f"megatron.pipeline_model_parallel_size={pp}")
    recipe = load_recipe("", ("trainer.backend=megatron", f"trainer.processes={tp * pp * dp}", *sizes))
    values = {v.name: v.value for v in megatron_bytes(recipe, spec, on_gpu=True)}
    ours = values["weights"] + values["gradients"] + values["optimizer"]
    assert ours == pytest.approx(weights_and_optimizer(spec, tp, pp, dp), rel=0.002)


def test_activations_are_those_of_the_paper():
    """Table 2 of arXiv 2205.05198 with sequence parallelism and selective recomputation: s b h 34 / t bytes for an MLP
    of 4 h. Ours has no dropout masks (2 bytes), and three inner widths and rotated queries and keys besides."""
    spec = get_spec("qwen2.5-7b")
    layout = Layout(world=8, tp=4, sp=True)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    paper = spec.hidden * 18 + 4 * spec.ffn  # as Megatron-LM's report generalises it
    ours = 2 * token_width(spec, layout, 0) * layout.tp
    heads = 2 * (3 * q + 3 * kv) - 2 * 4 * spec.hidden  # 2 (q + k + v + out) is 8 h there
    assert ours == pytest.approx(paper - 2 * spec.hidden + 2 * spec.ffn + heads, rel=1e-6)


def recipe_of(*overrides, processes=1, kl=0.0):
    return load_recipe(
        "", ("trainer.backend=megatron", f"trainer.processes={processes}", f"algo.kl_coef={kl}", *overrides)
    )


def test_memory_follows_the_layout():
    spec = get_spec("qwen3-4b")

    def values(*overrides, gpu=True, **kw):
        return {
            (v.group.split()[0], v.name): v.value for v in megatron_bytes(recipe_of(*overrides, **kw), spec, on_gpu=gpu)
        }

    one = values(kl=0.1)
    assert one["host", "reference model"] == one["host", "own weights"] == one["memory", "weights"]
    assert ("memory", "reference model") in values(kl=0.1, gpu=False) and ("host", "total") not in values(
        kl=0.1, gpu=False
    )
    assert one["memory", "gradients"] == 2 * one["memory", "weights"], "float32 gradients of bf16 weights"
    assert one["memory", "optimizer"] == 6 * one["memory", "weights"]
    divided = values(processes=4)
    assert divided["memory", "optimizer"] == pytest.approx(one["memory", "optimizer"] / 4, rel=1e-6)
    whole = values("megatron.use_distributed_optimizer=false", processes=4)
    assert whole["memory", "optimizer"] == one["memory", "optimizer"]
    name = ("memory", "activations, estimated")
    full = values("trainer.activation_checkpointing=true")
    assert full[name] < one[name] / 5
    both = values("algo.old_log_probs=published", kl=0.1)
    waits = [both["host", name] for name in ("reference model", "published weights", "own weights")]
    assert waits == [one["memory", "weights"]] * 3 and both["host", "total"] == sum(waits)
    ppo = values("algo.name=ppo")
    both = one["memory", "weights"] + one["memory", "gradients"]
    assert ppo["memory", "critic"] == pytest.approx(both, rel=1e-4), "tied: neither has an output layer"
    assert ppo["memory", "optimizer"] == pytest.approx(2 * one["memory", "optimizer"], rel=1e-4)
    turns = values("algo.name=ppo", "algo.critic_offload=true")
    assert {k: v for k, v in turns.items() if k[0] == "memory"} == {
        k: v for k, v in values().items() if k[0] == "memory"
    }
    state = sum(one["memory", part] for part in ("weights", "gradients", "optimizer"))
    assert turns["host", "policy"] == state and turns["host", "critic"] == pytest.approx(state, rel=1e-4)
    assert turns["host", "total"] == turns["host", "policy"] + turns["host", "critic"]
    assert values("algo.name=ppo", "algo.critic_offload=true", gpu=False) == values("algo.name=ppo", gpu=False)
    modules = ("megatron.recompute_granularity=selective", "megatron.recompute_modules=['mlp']")
    assert full[name] < values(*modules)[name] < one[name]
    away = values("megatron.optimizer_cpu_offload=true", "megatron.optimizer_offload_fraction=0.75")
    assert away["host", "optimizer"] == 3 * away["memory", "optimizer"] == one["memory", "optimizer"] * 0.75
    options = ("megatron.optimizer_cpu_offload=true", "megatron.optimizer_offload_fraction=1.0")
    third = values("algo.name=ppo", "algo.critic_offload=true", *options)
    assert third["memory", "optimizer"] == 0 and third["host", "policy"] == state - one["memory", "optimizer"]
    assert third["host", "optimizer"] == pytest.approx(2 * one["memory", "optimizer"], rel=1e-4)
    tp = "megatron.tensor_model_parallel_size=4"
    split = values(tp, "megatron.sequence_parallel=true", processes=4)
    assert split[name] == pytest.approx(one[name] / 4, rel=0.01)
    assert split["memory", "weights"] == pytest.approx(one["memory", "weights"] / 4, rel=0.001)
    stages = values("megatron.pipeline_model_parallel_size=4", processes=4)
    assert stages[name] == pytest.approx(one[name], rel=0.01), "a quarter of the layers, four micro-batches in flight"


def test_a_teacher_waits_in_host_memory(model_of):
    """One of another architecture comes to the device beside the policy; one of the policy's takes its place."""
    spec = from_config(read_json(model_of("qwen3", 4) / "config.json"))

    def host(folder, where="host"):
        values = megatron_bytes(recipe_of(f"distill.teacher={folder}"), spec, on_gpu=True)
        return {v.name: v.value for v in values if v.group.startswith(where) and v.name != "total"}

    size = 2 * sum(np.size(t) for t in initial(model_of("llama", 8)).values())
    assert host(model_of("llama", 8)) == {"teacher": pytest.approx(size, rel=0.5)}
    assert host(model_of("llama", 8), "memory")["teacher at work"] == host(model_of("llama", 8))["teacher"]
    assert "teacher at work" not in host(model_of("qwen3", 4), "memory")
    alike = host(model_of("qwen3", 4))
    assert set(alike) == {"teacher", "own weights"} and len(set(alike.values())) == 1
    assert host("nowhere") == {}


def test_each_decision_is_told_with_its_reason():
    spec = get_spec("qwen3-4b")
    recipe = recipe_of("megatron.pipeline_model_parallel_size=2", processes=2)
    told = {n: v for v in decided_values(recipe, spec, on_gpu=False) for n in v.name.split(", ")}
    assert told["layout"].value == "PP2"
    forced = settings_of(recipe, spec, on_gpu=False).forced
    assert {n for n, _, _ in forced} < set(told) and all(told[n].reason.endswith(reason) for n, _, reason in forced)
    changed = recipe_of("megatron.use_distributed_optimizer=false")
    assert not [v for v in decided_values(changed, spec, on_gpu=True) if "distributed_optimizer" in v.name]
