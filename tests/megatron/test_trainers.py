"""A trainer's checkpoint is Megatron's: its loader puts it into models and optimizers that slime has no part in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import save_file

from slimecli.trainers import open_trainer
from slimecli.trainers.megatron import optimizer as fused_adam
from tests.megatron.expected import Expected
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, megatron_model, tensors_of
from tests.megatron.test_load import compare, content_metadata
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

TP2 = megatron("tensor_model_parallel_size=2", processes=2)
EP2 = megatron("expert_model_parallel_size=2", processes=2)
STEPS = 2


def train_and_save(hf: Path, out: Path, options: tuple[str, ...]) -> None:
    """On one rank; the trained weights are left beside the checkpoint as an HF folder has them."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, hf, total_steps=5)
    for seed in range(STEPS):
        trainer.step(made.batch(recipe, seed=seed))
    trainer.save(out)
    found = weights_of(trainer)
    if torch.distributed.get_rank() == 0:
        save_file({name: torch.from_numpy(array) for name, array in found.items()}, out / "model.safetensors")


def read_by_megatron(world: World, hf: Path, folder: Path, trained: Path) -> None:
    """On one rank of a model that slime has no part in."""
    config = config_of(hf)
    model = megatron_model(config, world, torch.float32, sequence_parallel=False)
    tree = {"model": model.sharded_state_dict(metadata=content_metadata(folder))}
    loaded, unused, lacking = dist_checkpointing.load(tree, str(folder), strict="return_all")
    assert not lacking and not [key for key in unused if "_extra_state" not in key and not key.startswith("optimizer.")]
    model.load_state_dict(loaded["model"])
    compare(model, Expected(tensors_of(trained), config, PADDED).of(model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, hub):
    """(family, layout) -> HF folder, folder of a trainer's checkpoint."""
    found: dict[Any, tuple[Path, Path]] = {}

    def make(family: str, options: tuple[str, ...]) -> tuple[Path, Path]:
        if (family, options) not in found:
            hf, out = hub(family, "float32"), tmp_path_factory.mktemp("trainer")
            run_ranks(world_of(options), train_and_save, hf, out, options, join=False)
            found[family, options] = hf, out
        return found[family, options]

    return make


@pytest.mark.parametrize(
    ("family", "options", "world"),
    [
        ("qwen3", TP2, World()),
        ("qwen3", TP2, World(pp=2)),
        ("qwen3_moe", EP2, World()),
        ("qwen3_moe", EP2, World(ep=2, ranks=2)),
    ],
    ids=lambda v: " ".join(v[2:]) if isinstance(v, tuple) else str(v),
)
def test_megatron_loads_the_weights_of_a_trainer(saved, family, options, world):
    hf, out = saved(family, options)
    run(world, read_by_megatron, hf, out / f"iter_{STEPS:07d}", out)


def optimizer_read_by_megatron(world: World, hf: Path, folder: Path, trained: Path) -> None:
    """As Megatron-LM resumes: weights and optimizer in one tree, described by what the checkpoint says of itself."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fused_adam.install()  # the form of state that FusedAdam has on GPUs; megatron-core cannot load that of torch's Adam
    config = config_of(hf)
    model = megatron_model(config, world, torch.float32)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.0, use_distributed_optimizer=True, clip_grad=0.0), [wrapped]
    )
    metadata = content_metadata(folder)
    tree: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    tree["optimizer"] = optimizer.sharded_state_dict(tree, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(tree, str(folder))
    assert (loaded["iteration"], loaded["args"].num_layers) == (STEPS, config["num_hidden_layers"])
    assert loaded["args"].no_save_rng, "or Megatron-LM would look for random states"
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    [inner] = optimizer.chained_optimizers
    groups = inner.optimizer.param_groups
    assert all(group["step"] == STEPS for group in groups)
    states = [inner.optimizer.state[p] for group in groups for p in group["params"]]
    assert states and all(float(s["exp_avg_sq"].sum()) > 0 for s in states)
    mains = torch.cat([p.detach().reshape(-1) for group in groups for p in group["params"]])
    assert torch.isfinite(mains).all()


@pytest.mark.parametrize("world", [World(), World(tp=2), World(ranks=2)], ids=["one", "TP2", "DP2"])
def test_megatron_resumes_adam_where_a_trainer_stopped(saved, world):
    hf, out = saved("qwen3", TP2)
    run(world, optimizer_read_by_megatron, hf, out / f"iter_{STEPS:07d}", out)
