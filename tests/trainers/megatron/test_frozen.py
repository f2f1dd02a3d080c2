"""Teacher and old policy under Megatron: what FSDP says of the same models, at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimecli.errors import SlimeError, UsageError
from slimecli.trainers import open_trainer
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.megatron.ranks import LIKE_SGD, megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
SP, ETP1, OVERLAP = "sequence_parallel=true", "expert_tensor_parallel_size=1", "overlap_param_gather=true"
LAYOUTS = {
    "one": megatron(),
    "TP2": megatron(TP2, SP, processes=2),
    "PP2": megatron(PP2, processes=2),
    "VPP2": megatron(PP2, VPP2, processes=2),
    "DP2": megatron("overlap_grad_reduce=true", OVERLAP, processes=2),
    "CP2": megatron(CP2, processes=2),
}


def alone(folder: Path) -> np.ndarray:
    """FSDP's log-probs of a model."""
    found: np.ndarray = made.trainer(folder).log_probs(made.batch(made.recipe())).numpy()
    return found


def train(folder: Path, options: tuple[str, ...]) -> list[np.ndarray]:
    """On one rank: teacher, policy; after a step old policy, policy, teacher; after publishing and a step the same."""
    recipe = made.recipe(*LIKE_SGD, "algo.old_log_probs=published", *options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    batch = made.batch(made.recipe())
    seen = [trainer.log_probs(batch, "teacher"), trainer.log_probs(batch)]
    for _ in range(2):
        trainer.step(batch)
        seen += [trainer.log_probs(batch, name) for name in ("old_policy", "policy", "teacher")]
        weights_of(trainer)
    return [s.numpy().copy() for s in seen]


def check(folder: Path, teacher: Path, layout: tuple[str, ...], expected: np.ndarray) -> None:
    options = (f"distill.teacher={teacher}", *layout)
    for seen in run_ranks(world_of(options), train, folder, options, join=False):
        for number in (0, 4, 7):
            assert np.abs(seen[number] - expected).max() < 3e-5
        first, second, third = seen[1], seen[3], seen[6]
        assert np.abs(first - second).max() > 1e-2 < np.abs(second - third).max()
        assert np.abs(seen[2] - first).max() == 0
        assert np.abs(seen[5] - second).max() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_one_architecture(model_of, tmp_path_factory, layout):
    """Its weights take turns with the policy's."""
    teacher = tmp_path_factory.mktemp("teacher")
    tiny_model(teacher, "qwen3", seed=3, num_hidden_layers=4)
    check(model_of("qwen3", 4), teacher, LAYOUTS[layout], alone(teacher))


@pytest.mark.parametrize("layout", ["one", "TP2", "PP2", "VPP2", "CP2"])
def test_of_another_architecture(model_of, layout):
    teacher = model_of("llama", 8)
    check(model_of("qwen3", 4), teacher, LAYOUTS[layout], alone(teacher))


def test_a_teacher_with_experts(model_of):
    teacher = model_of("qwen3_moe", 3)
    layout = megatron(TP2, SP, ETP1, processes=2)
    with_fsdp = made.trainer(model_of("qwen3", 4), f"distill.teacher={teacher}")
    expected = with_fsdp.log_probs(made.batch(made.recipe()), "teacher").numpy()
    check(model_of("qwen3", 4), teacher, layout, expected)


def old_and_replayed(folder: Path, options: tuple[str, ...]) -> tuple[float, float]:
    trainer = open_trainer(made.recipe(*options), folder, total_steps=5)
    batch = made.batch(made.recipe())
    trainer.log_probs(batch, "old_policy")
    return trainer.step(batch).metrics["routing_replayed"], trainer.step(batch).metrics["routing_replayed"]


def test_experts_that_the_old_policy_chose_are_replayed(model_of):
    options = ("algo.old_log_probs=published", *megatron("moe_enable_routing_replay=true"))
    assert run_ranks(1, old_and_replayed, model_of("qwen3_moe", 3), options, join=False)[0][0] == 1.0


def misuse(folder: Path, other: Path) -> list[str]:
    batch = made.batch(made.recipe())
    said = []

    def opened(*options: str) -> Any:
        return open_trainer(made.recipe(*options), folder, total_steps=5)

    for act in (
        lambda: opened(*megatron()).log_probs(batch, "teacher"),
        lambda: opened(*megatron()).log_probs(batch, "old_policy"),
        lambda: opened(*megatron(), f"distill.teacher={other}").log_probs(batch, "teacher"),
    ):
        with pytest.raises(SlimeError) as caught:
            act()
        said.append(str(caught.value))
    return said


def test_misuse_is_told(model_of, tmp_path):
    small = tiny_model(tmp_path, "llama", vocab=270)
    [(no_teacher, none_published, unknown)] = run_ranks(1, misuse, model_of("qwen3", 4), small, join=False)
    assert "holds no teacher" in no_teacher and "set distill.teacher" in no_teacher
    assert "holds no old policy" in none_published and "set algo.old_log_probs" in none_published
    assert "is none of the teacher's, whose embedding has 270 rows" in unknown


def opened_with(folder: Path, options: tuple[str, ...]) -> str:
    with pytest.raises(UsageError) as caught:
        open_trainer(made.recipe(*options), folder, total_steps=5)
    return str(caught.value)


def test_a_layout_that_only_the_policy_fits_is_refused(model_of):
    options = (f"distill.teacher={model_of('llama', 3)}", *LAYOUTS["PP2"])
    for said in run_ranks(2, opened_with, model_of("qwen3", 4), options, join=False):
        assert "3 layers cannot be divided over 2 pipeline parts" in said and "distill.url" in said
