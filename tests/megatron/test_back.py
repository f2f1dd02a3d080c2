"""What megatron-core itself has written converts back to exactly the HF tensors, however it was trained and saved."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import FileSystemReader

from slimecli.weights.convert import torch_dist_to_hf
from tests.megatron.expected import Expected
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, megatron_model, tensors_of


@dataclass(frozen=True)
class Saved:
    """How the checkpoint is written."""

    world: World
    numbered: bool = True
    """a key per layer; otherwise the layers of a homogeneous model are stacked"""
    optimizer: str = ""
    """sharding type of the distributed optimizer's state, which is then saved too"""
    one_by_one: bool = False
    """experts as separate modules"""

    def __str__(self) -> str:
        parts = [str(self.world), "numbered" if self.numbered else "stacked", self.optimizer]
        return "-".join(p for p in (*parts, "sequential" if self.one_by_one else "") if p)


def filled_model(saved: Saved, hf: Path) -> Any:
    """This rank's part of the model, with the HF folder's weights."""
    config = config_of(hf)
    changes = {"moe_grouped_gemm": False} if saved.one_by_one else {}
    model = megatron_model(config, saved.world, torch.bfloat16, **changes)
    expected = Expected(tensors_of(hf), config, PADDED).of(model)
    with torch.no_grad():
        for name, tensor in expected.items():
            model.state_dict()[name].copy_(tensor)
    return model


def save(_: World, saved: Saved, hf: Path, out: Path) -> None:
    """What Megatron-LM's save_checkpoint hands to megatron-core."""
    model = filled_model(saved, hf)
    stated = {
        "distrib_optim_sharding_type": saved.optimizer or "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": saved.numbered,
    }
    metadata = {**stated, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = model.sharded_state_dict(metadata=metadata)
    rank = torch.distributed.get_rank()
    state: dict[str, Any] = {
        "args": argparse.Namespace(num_layers=3, iteration=7),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": weights,
        "rng_state": ShardedObject(
            "rng_state", [{"torch_rng_state": torch.get_rng_state()}], (saved.world.size,), (rank,)
        ),
    }
    if saved.optimizer:
        state["optimizer"] = _optimizer(model).sharded_state_dict(state, metadata=metadata)
    dist_checkpointing.save(state, str(out), content_metadata=stated)
    if rank == 0:
        written = FileSystemReader(out).read_metadata().state_dict_metadata
        assert bool(saved.optimizer) == any(key.startswith("optimizer") for key in written)
        numbered = saved.numbered or isinstance(model.config.moe_layer_freq, list)
        assert numbered == any("decoder.layers.1." in key for key in written)


def _optimizer(model: Any) -> Any:
    """Megatron's distributed optimizer after one step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    settings = OptimizerConfig(optimizer="adam", lr=0.0, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()
    return optimizer


DENSE = [Saved(World(tp=2), numbered=False), Saved(World(pp=2), numbered=False), Saved(World(tp=2, pp=2))]
MOE = [
    Saved(World(ep=2, ranks=2), numbered=False),
    Saved(World(tp=2, ep=2, ranks=2), one_by_one=True),
    Saved(World(pp=2)),
    Saved(World(tp=2), numbered=False),
]
CASES = [("qwen3", saved) for saved in DENSE] + [("qwen2", DENSE[0]), ("mimo", DENSE[1])]
CASES += [(family, saved) for family in ("qwen3_moe", "glm4_moe", "deepseek_v3") for saved in MOE]
CASES += [(family, saved) for family in ("mixtral", "qwen2_moe") for saved in MOE]
CASES += [("moonlight", MOE[0])]
CASES += [
    ("qwen3", Saved(World(ranks=2), numbered=False, optimizer=kind)) for kind in ("dp_reshardable", "fully_reshardable")
]


@pytest.mark.parametrize(("family", "saved"), CASES, ids=lambda v: str(v))
def test_what_megatron_wrote_converts_back(tmp_path, hub, family, saved):
    hf = hub(family)
    folder = tmp_path / "megatron" / "iter_0000007"
    folder.mkdir(parents=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    run(saved.world, save, saved, hf, folder)
    torch_dist_to_hf(folder.parent, tmp_path / "back", like=hf)
    back = tensors_of(tmp_path / "back")
    # a repository's second copies of embedding and output layer are not in a Megatron model
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    theirs = {name: tensor for name, tensor in tensors_of(hf).items() if name not in copies}
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name], tensor), name
