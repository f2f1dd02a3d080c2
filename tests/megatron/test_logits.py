"""megatron-core's model, filled from slime's checkpoint, computes what transformers computes from the HF folder.

Compared in float32. The difference is rounding: sums over tensor-parallel ranks and experts are taken in another order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.harness import World, run
from tests.megatron.models import config_of, megatron_model
from tests.megatron.test_load import load

TOLERANCE = 2e-5
"""largest difference of logits, which reach about 5"""
TOKENS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
TP1, TP2, EP2 = World(), World(tp=2), World(ep=2, ranks=2)
CASES = [("qwen3", TP1), ("qwen3", TP2), ("qwen2", TP2), ("qwen3_moe", TP1), ("qwen3_moe", EP2)]
CASES += [(family, world) for family in ("mixtral", "qwen2_moe") for world in (TP1, TP2, EP2)]
CASES += [(family, world) for family in ("glm4_moe", "deepseek_v3", "moonlight") for world in (TP1, TP2)]


def megatron_logits(world: World, hf: Path, folder: Path, theirs: torch.Tensor) -> None:
    # prediction layers have no part in the logits
    model = megatron_model(config_of(hf), world, torch.float32, mtp_num_layers=None, sequence_parallel=False)
    load(model, folder, prediction=False)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        ours = model(TOKENS, positions, None)[..., : theirs.shape[-1]]
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "world"), CASES, ids=lambda v: str(v))
def test_same_logits(hub, converted, family, world):
    from transformers import AutoModelForCausalLM

    hf = hub(family, "float32")
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        theirs = model(TOKENS).logits
    run(world, megatron_logits, hf, converted(family, "float32"), theirs)
