"""The critic under Megatron: as FSDP's at every layout, resumed at any other, warmed up alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimecli.algos import algorithm
from slimecli.errors import SlimeError
from slimecli.trainers import open_trainer
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import LIKE_SGD, differences, megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

PPO = ("algo.name=ppo", "algo.value_clip=10", "algo.critic_lr=3e2", "algo.kl_coef=0.1", *LIKE_SGD)
TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
SP, ETP1 = "sequence_parallel=true", "expert_tensor_parallel_size=1"
SMALL = "trainer.max_tokens_per_micro_batch=48"
LAYOUTS = {
    "one": megatron(),
    "TP2": megatron(TP2, processes=2),
    "TP2 SP": (*megatron(TP2, SP, processes=2), SMALL),
    "PP2": (*megatron(PP2, processes=2), SMALL),
    "VPP2": (*megatron(PP2, VPP2, processes=2), SMALL),
    "DP2": (*megatron(processes=2), SMALL),
    "DP2 overlap": (*megatron("overlap_grad_reduce=true", "overlap_param_gather=true", processes=2), SMALL),
    "CP2": (*megatron(CP2, processes=2), SMALL),
    "TP2 EP2": megatron(TP2, SP, EP2, ETP1, processes=2),
    "EP2 replay": megatron(EP2, "moe_enable_routing_replay=true", processes=2),
}
LIMITS = {"log_probs": 3e-5, "stats": 2e-5, "update": 5e-5}
"""values are compared with the log-probs, the weights of the policy by their update"""


def ready(trainer: Any, recipe: Any, seed: int) -> Any:
    """A batch as the loop prepares it."""
    batch = made.batch(made.recipe(), seed=seed)
    if recipe.algo.kl_coef > 0:
        batch = batch.replace(ref_log_probs=trainer.log_probs(batch, "reference"))
    batch = batch.replace(old_log_probs=trainer.log_probs(batch), values=trainer.log_probs(batch, "critic"))
    ppo = algorithm("ppo")
    return batch.replace(returns=ppo.returns(batch, recipe.algo), advantages=ppo.advantages(batch, recipe.algo))


def steps(trainer: Any, recipe: Any, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Values and log-probs before each step, statistics, values and policy afterwards."""
    seen: dict[str, Any] = {"log_probs": [], "stats": []}
    for seed in seeds:
        batch = ready(trainer, recipe, seed)
        seen["log_probs"] += [batch.values.numpy().copy(), batch.old_log_probs.numpy().copy()]
        seen["stats"].append(asdict(trainer.step(batch)))
    if recipe.algo.name == "ppo":
        seen["log_probs"].append(trainer.log_probs(made.batch(made.recipe(), seed=9), "critic").numpy().copy())
    seen["weights"] = weights_of(trainer)
    return seen


def train(folder: Path, options: tuple[str, ...], save: Path | None, load: Path | None, seeds: tuple[int, ...]) -> Any:
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    if load:
        trainer.load(load)
    seen = steps(trainer, recipe, seeds)
    if save:
        save.mkdir(exist_ok=True)
        trainer.save(save)
    return seen


def on_ranks(
    folder: Path, *options: str, save: Path | None = None, load: Path | None = None, seeds: tuple[int, ...] = (0, 1)
) -> Any:
    return run_ranks(world_of(options), train, folder, options, save, load, seeds, join=False)[0]


@pytest.fixture(scope="module")
def expected(model_of):
    """What the FSDP trainer makes of a dense model, and one Megatron process of one with experts."""
    found: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in found:
            found[family] = on_ranks(model_of(family, 4), *PPO, *(megatron() if family == "qwen3_moe" else ()))
        return found[family]

    return make


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "EP2" not in name])
def test_it_learns_as_with_fsdp(model_of, expected, layout):
    """Tied embeddings: the critic's only the input's gradient moves."""
    folder = model_of("qwen3", 4)
    found = on_ranks(folder, *PPO, *LAYOUTS[layout])
    assert np.abs(found["log_probs"][0]).max() == 0 and np.abs(found["log_probs"][2]).max() > 0.01
    assert found["stats"][0]["metrics"]["critic_grad_norm"] > 0.1
    apart = differences(found, expected("qwen3"), initial(folder))
    assert all(apart[what] <= limit for what, limit in LIMITS.items()), apart


@pytest.mark.parametrize(("family", "layout"), [("llama", "PP2"), ("glm4", "TP2 SP")])
def test_of_other_dense_families(model_of, expected, family, layout):
    folder = model_of(family, 4)
    apart = differences(on_ranks(folder, *PPO, *LAYOUTS[layout]), expected(family), initial(folder))
    assert all(apart[what] <= limit for what, limit in LIMITS.items()), apart


@pytest.mark.parametrize("layout", ["TP2 EP2", "EP2 replay"])
def test_with_experts_it_learns_as_in_one_process(model_of, expected, layout):
    folder = model_of("qwen3_moe", 4)
    found = on_ranks(folder, *PPO, *LAYOUTS[layout])
    for stats in found["stats"]:
        assert stats["metrics"].pop("routing_replayed", 1.0) == 1.0
    apart = differences(found, expected("qwen3_moe"), initial(folder))
    assert all(apart[what] <= limit for what, limit in LIMITS.items()), apart


@pytest.mark.parametrize(
    ("first", "second", "warmup"),
    [("one", "one", 0), ("TP2 SP", "PP2", 1), ("PP2", "DP2", 3), ("DP2 overlap", "TP2", 0), ("VPP2", "one", 1)],
)
def test_a_resumed_critic_goes_on_as_if_nothing_had_been(model_of, tmp_path, first, second, warmup):
    folder = model_of("qwen3", 4)
    options = ("algo.name=ppo", "algo.critic_lr=1e-2", f"algo.critic_warmup={warmup}")
    whole = on_ranks(folder, *options, *LAYOUTS[first], seeds=(0, 1, 2, 3))
    on_ranks(folder, *options, *LAYOUTS[first], save=tmp_path, seeds=(0, 1))
    rest = on_ranks(folder, *options, *LAYOUTS[second], load=tmp_path, seeds=(2, 3))
    same = first == second
    for a, b in zip(rest["log_probs"], whole["log_probs"][4:], strict=True):
        assert np.abs(a - b).max() <= (0 if same else 2e-4)
    assert [s["lr"] for s in rest["stats"]] == [s["lr"] for s in whole["stats"][2:]]
    for a, b in zip(rest["stats"], whole["stats"][2:], strict=True):
        assert a["metrics"] == pytest.approx(b["metrics"], rel=0 if same else 1e-3, abs=0 if same else 1e-4)


@pytest.mark.parametrize("layout", ["one", "DP2 overlap", "TP2 EP2"])
def test_in_the_warm_up_only_the_critic_learns(model_of, layout):
    folder = model_of("qwen3_moe" if "EP2" in layout else "qwen3", 4)
    options = (*PPO, "algo.critic_warmup=2", *LAYOUTS[layout])
    found = on_ranks(folder, *options)
    start = initial(folder)
    assert all(np.array_equal(found["weights"][name], start[name]) for name in found["weights"])
    assert [s["lr"] for s in found["stats"]] == [0.0, 0.0]
    without = on_ranks(folder, *PPO, *LAYOUTS[layout], seeds=(0,))
    assert found["stats"][0]["grad_norm"] == pytest.approx(without["stats"][0]["grad_norm"], rel=1e-6) != 0
    assert found["stats"][1]["metrics"]["value_loss"] < found["stats"][0]["metrics"]["value_loss"]
    third = on_ranks(folder, *options, seeds=(0, 1, 2))
    assert third["stats"][2]["lr"] > 0
    assert any(not np.array_equal(third["weights"][name], start[name]) for name in start)


def test_what_is_published_and_saved_as_the_model_is_the_policy_alone(model_of, tmp_path):
    from safetensors.torch import load_file

    from slimecli.weights.convert import torch_dist_to_hf

    folder = model_of("qwen3", 4)
    seen = on_ranks(folder, *PPO, *LAYOUTS["TP2"], save=tmp_path / "made")
    assert set(seen["weights"]) == set(initial(folder))
    torch_dist_to_hf(tmp_path / "made", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(found[name].numpy(), tensor) for name, tensor in seen["weights"].items())
    with pytest.raises(AssertionError, match=r"DataError: .*critic.*latest_checkpointed_iteration"):
        on_ranks(folder, "algo.kl_coef=0.1", *LAYOUTS["TP2"], save=tmp_path / "plain", seeds=())
        on_ranks(folder, *PPO, *LAYOUTS["one"], load=tmp_path / "plain")


def misuse(folder: Path) -> list[str]:
    said = []
    batch = made.batch(made.recipe())
    for options, act in (
        ((), lambda trainer: trainer.log_probs(batch, "critic")),
        (("algo.name=ppo",), lambda trainer: trainer.step(batch)),
    ):
        trainer = open_trainer(made.recipe(*megatron(), *options), folder, total_steps=5)
        with pytest.raises(SlimeError) as caught:
            act(trainer)
        said.append(str(caught.value))
    return said


def test_misuse_is_told(model_of):
    [(no_critic, no_values)] = run_ranks(1, misuse, model_of("qwen3"), join=False)
    assert "holds no critic" in no_critic
    assert "the batch has no values" in no_values
