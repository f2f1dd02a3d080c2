"""megatron-core's own loader reads what slime writes, into megatron-core's own models, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state

from tests.megatron.expected import Expected
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, megatron_model, tensors_of

TP1, TP2, PP2 = World(), World(tp=2), World(pp=2)
TP2_PP2 = World(tp=2, pp=2)
EP2, EP2_ETP2 = World(ep=2, ranks=2), World(tp=2, ep=2, etp=2, ranks=4)
TP2_EP2 = World(tp=2, ep=2, ranks=2)
DENSE = [("qwen3", w) for w in (TP1, TP2, PP2, TP2_PP2)] + [("qwen2", TP2), ("llama", TP2_PP2)]
MOE = [(c, w) for c in ("qwen3_moe", "glm4_moe", "deepseek_v3") for w in (TP1, TP2, PP2, EP2, TP2_EP2)]
REST = [("glm4_moe", EP2_ETP2), ("moonlight", TP2), ("moonlight", EP2), ("mimo", TP1), ("mimo", TP2), ("mimo", PP2)]
REST += [(c, w) for c in ("mixtral", "qwen2_moe") for w in (TP1, TP2, PP2, EP2, TP2_EP2)]
REST += [("kimi_k2", TP2), ("glm4_moe_lite", EP2)]


def content_metadata(folder: Path) -> dict[str, Any]:
    """What Megatron-LM hands to sharded_state_dict when it loads a checkpoint: what the checkpoint says of itself."""
    stated = dist_checkpointing.load_content_metadata(str(folder))
    assert stated["non_homogeneous_layers"]
    return {**stated, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def load(model: Any, folder: Path, *, prediction: bool = True) -> None:
    """Megatron-LM's way of loading a model's weights; the model lacks nothing, and no weight is left over."""
    wanted = {"model": model.sharded_state_dict(metadata=content_metadata(folder))}
    loaded, unused, lacking = dist_checkpointing.load(wanted, str(folder), strict="return_all")
    assert not lacking
    # copies of the embedding that some repositories store with their prediction layer are kept under the HF name
    ignored = ("model.layers.",) if prediction else ("model.layers.", "mtp.")
    assert not [key for key in unused if "._extra_state" not in key and not key.startswith(ignored)]
    model.load_state_dict(loaded["model"])


def compare(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, dtype included."""
    found = model.state_dict()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (name, found[name].dtype)
        assert found[name].shape == tensor.shape, (name, found[name].shape, tensor.shape)
        assert torch.equal(found[name], tensor), name
    assert len(expected) >= 8


def load_and_compare(world: World, hf: Path, folder: Path, changes: dict[str, Any]) -> None:
    """On one rank: what was loaded is this rank's part of the HF tensors."""
    config = config_of(hf)
    model = megatron_model(config, world, torch.bfloat16, **changes)
    load(model, folder)
    compare(model, Expected(tensors_of(hf), config, PADDED).of(model))


@pytest.mark.parametrize(("family", "world"), DENSE + MOE + REST, ids=lambda v: str(v))
def test_megatron_loads_what_slime_writes(hub, converted, family, world):
    run(world, load_and_compare, hub(family), converted(family), {})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_models_with_experts_one_by_one_load_it_too(hub, converted, family):
    run(EP2, load_and_compare, hub(family), converted(family), {"moe_grouped_gemm": False})
