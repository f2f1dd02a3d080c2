"""mbridge as the bridge: it loads and publishes what slime's maps do, bit for bit, and trains alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimecli.errors import SlimeError
from slimecli.trainers import open_trainer
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

TP2, PP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
SP, ETP1 = "sequence_parallel=true", "expert_tensor_parallel_size=1"
THEIRS = "trainer.bridge=mbridge"
CASES = [
    ("qwen3", megatron()),
    ("qwen3", megatron(TP2, processes=2)),
    ("qwen3", megatron(PP2, processes=2)),
    ("qwen3", megatron(PP2, VPP2, processes=2)),
    ("qwen2", megatron(TP2, SP, processes=2)),
    ("llama", megatron(TP2, PP2, processes=4)),
    ("mimo", megatron(TP2, processes=2)),
    ("qwen3_moe", megatron(EP2, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("mixtral", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("mixtral", megatron(PP2, processes=2)),
    ("qwen2_moe", megatron(TP2, SP, processes=2)),
    ("qwen2_moe", megatron(EP2, processes=2)),
    ("glm4_moe", megatron(TP2, SP, processes=2)),
    ("deepseek_v3", megatron(TP2, SP, EP2, ETP1, processes=2)),
]


def live(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """What a rank holds, and what is published before and after a step."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    held = {
        f"{number}.{name}": tensor.detach().numpy().copy()
        for number, chunk in enumerate(trainer._policy.bare)
        for name, tensor in chunk.state_dict().items()
        if hasattr(tensor, "numpy")
    }
    before = weights_of(trainer)
    stats = trainer.step(made.batch(recipe))
    return {"held": held, "before": before, "after": weights_of(trainer), "norm": stats.grad_norm}


@pytest.mark.parametrize(("family", "layout"), CASES, ids=[f"{f} {' '.join(o[1:])}" for f, o in CASES])
def test_it_is_slimes_bit_for_bit(model_of, family, layout):
    folder = model_of(family, 3 if family == "deepseek_v3" else 4)
    ours, theirs = (
        run_ranks(world_of(layout), live, folder, (*layout, *extra), join=False) for extra in ((), (THEIRS,))
    )
    start = initial(folder)
    for a, b in zip(theirs, ours, strict=True):
        assert a["norm"] == b["norm"]
        for part in ("held", "before", "after"):
            assert a[part].keys() == b[part].keys()
            assert all(np.array_equal(a[part][name], b[part][name]) for name in b[part]), part
        assert all(np.array_equal(a["before"][name], start[name]) for name in a["before"])
        assert any(not np.array_equal(a["after"][name], start[name]) for name in start)


def with_critic_and_teacher(folder: Path, options: tuple[str, ...]) -> list[np.ndarray]:
    trainer = open_trainer(made.recipe("algo.name=ppo", *options), folder, total_steps=5)
    batch = made.batch(made.recipe())
    found = [trainer.log_probs(batch, name).numpy().copy() for name in ("critic", "teacher")]
    held = [p.detach().numpy().copy() for c in trainer._critic.bare for p in c.parameters()]
    return found + held


@pytest.mark.parametrize("layout", [megatron(TP2, processes=2), megatron(PP2, processes=2)], ids=["TP2", "PP2"])
def test_critic_and_teacher_are_loaded_by_it_too(model_of, layout):
    options = (*layout, f"distill.teacher={model_of('llama', 4)}")
    folder = model_of("qwen3", 4)
    ours, theirs = (
        run_ranks(2, with_critic_and_teacher, folder, (*options, *extra), join=False) for extra in ((), (THEIRS,))
    )
    for a, b in zip(theirs, ours, strict=True):
        assert len(a) == len(b) > 10 and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def refusal(folder: Path, installed: bool) -> str:
    if not installed:
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "mbridge" else find(name, *rest)
    with pytest.raises(SlimeError) as caught:
        open_trainer(made.recipe(*megatron(), THEIRS), folder, total_steps=5)
    return str(caught.value)


def test_what_it_cannot_is_told(model_of):
    [said] = run_ranks(1, refusal, model_of("glm4", 4), True, join=False)
    assert "has no map for glm4 models, only for" in said and "qwen3_moe" in said and "trainer.bridge to slime" in said
    [said] = run_ranks(1, refusal, model_of("qwen3", 4), False, join=False)
    assert "which is not installed" in said and "pip install mbridge" in said
