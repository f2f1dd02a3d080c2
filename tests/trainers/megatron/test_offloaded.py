"""An optimizer whose state is (partly) in host memory makes the same steps, and goes on with them after a resume.

There is no GPU here. megatron-core divides an optimizer by asking each weight whether it is on one; in these tests all
say so until they are copied to the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from slimecli.trainers import open_trainer
from slimecli.trainers.megatron import arguments, runtime
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.megatron.test_critic import steps
from tests.trainers.processes import run_ranks


class AllOnGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU, except copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return not any(args[0] is copy for copy in self.copies)
        if func is torch.Tensor.cpu:
            self.copies.append(args[0].detach().clone())
            return self.copies[-1]
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def in_half_precision(monkeypatch):
    """As on a GPU."""
    plain = arguments._transformer, arguments._optimizer
    half = {"bf16": True, "params_dtype": "bfloat16"}
    monkeypatch.setattr(arguments, "NEEDS_GPU", ())
    monkeypatch.setattr(arguments, "_transformer", lambda *a: {**plain[0](*a), **half, "pipeline_dtype": "bfloat16"})
    monkeypatch.setattr(arguments, "_optimizer", lambda *a: {**plain[1](*a), **half})
    make, device = runtime.make_optimizer, AllOnGpu()

    def make_optimizer(chunks: list[Any], settings: Any) -> Any:
        with device:
            return make(chunks, settings)

    monkeypatch.setattr(runtime, "make_optimizer", make_optimizer)


def shares(trainer: Any) -> tuple[int, int]:
    """Weights that the optimizers inside count as (the device's, the host's)."""
    found = [0, 0]
    for part in trainer._policy._optimizer.chained_optimizers:
        for inner in getattr(part.optimizer, "sub_optimizers", [part.optimizer]):
            sizes = [p.numel() for group in inner.param_groups for p in group["params"]]
            found[type(inner).__name__ == "HostAdamW"] += sum(sizes)
    return found[0], found[1]


def train(folder: Path, options: tuple[str, ...], seeds: tuple[int, ...], save: Path | None, load: Path | None) -> Any:
    recipe = made.recipe("model.dtype=bfloat16", "trainer.weight_decay=0.1", *options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    if load:
        with AllOnGpu():
            trainer.load(load)
    stats = [trainer.step(made.batch(recipe, seed=seed)) for seed in seeds]
    if save:
        save.mkdir(exist_ok=True)
        trainer.save(save)
    return [(s.loss, s.grad_norm) for s in stats], weights_of(trainer), shares(trainer)


def on_ranks(folder: Path, options: tuple[str, ...], seeds: Any, save: Any = None, load: Any = None) -> Any:
    return run_ranks(world_of(options), train, folder, options, seeds, save, load, join=False)[0]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_it_makes_the_same_steps(model_of, tmp_path, processes, fraction):
    folder = model_of("qwen3_moe" if fraction == 1 else "qwen3", 3)
    plain = megatron(processes=processes)
    away = (*plain, "megatron.optimizer_cpu_offload=true", f"megatron.optimizer_offload_fraction={fraction}")
    expected = on_ranks(folder, plain, (0, 1, 2))
    found = on_ranks(folder, away, (0, 1, 2))
    assert found[0] == expected[0]
    assert all(np.array_equal(found[1][name], expected[1][name]) for name in expected[1])
    device, host = found[2]
    assert (device == 0) == (fraction == 1) and host >= fraction * (device + host)
    on_ranks(folder, away, (0, 1), save=tmp_path / "made")
    for options in (away, plain):
        resumed = on_ranks(folder, options, (2,), load=tmp_path / "made")
        assert resumed[0] == expected[0][2:]
        assert all(np.array_equal(resumed[1][name], expected[1][name]) for name in expected[1])


def test_a_checkpoint_of_no_step_and_the_way_back(model_of, tmp_path):
    folder, plain = model_of("qwen3", 3), megatron()
    away = (*plain, "megatron.optimizer_cpu_offload=true", "megatron.optimizer_offload_fraction=0.5")
    expected = on_ranks(folder, plain, (0, 1))
    on_ranks(folder, away, (), save=tmp_path / "none")
    assert on_ranks(folder, away, (0, 1), load=tmp_path / "none")[0] == expected[0]
    on_ranks(folder, plain, (0,), save=tmp_path / "one")
    assert on_ranks(folder, away, (1,), load=tmp_path / "one")[0] == expected[0][1:]


def two_steps(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    recipe = made.recipe("model.dtype=bfloat16", "algo.name=ppo", "algo.critic_lr=1e-2", *options)
    return steps(open_trainer(recipe, folder, total_steps=5), recipe, (0, 1))


def test_policy_and_critic_in_turns_with_their_optimizers_in_host_memory(model_of):
    folder, plain = model_of("qwen3", 3), megatron()
    away = (
        "algo.critic_offload=true",
        "megatron.optimizer_cpu_offload=true",
        "megatron.optimizer_offload_fraction=0.5",
    )
    [expected] = run_ranks(1, two_steps, folder, plain, join=False)
    [found] = run_ranks(1, two_steps, folder, (*plain, *away), join=False)
    assert found["stats"] == expected["stats"]
    assert all(np.array_equal(a, b) for a, b in zip(found["log_probs"], expected["log_probs"], strict=True))
    assert all(np.array_equal(found["weights"][name], tensor) for name, tensor in expected["weights"].items())
