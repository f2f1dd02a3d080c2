"""Tokens pass, in the training pass, through the experts that the log-prob pass chose, at every layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimecli.errors import SlimeError
from slimecli.trainers import open_trainer
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import LIKE_SGD, differences, megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

REPLAY = "moe_enable_routing_replay=true"
FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
SP = ("tensor_model_parallel_size=2", "sequence_parallel=true")
EP = "expert_model_parallel_size=2"
PP = "pipeline_model_parallel_size=2"
SMALL = "trainer.max_tokens_per_micro_batch=48"
FAR = (*LIKE_SGD, "trainer.lr=3e4")
"""steps so far that many tokens would be routed otherwise"""


def two_steps(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Log-probs of a rollout, then a step on each half of it; and what every router was asked and answered."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    rollout = made.batch(recipe, count=4)
    routed: list[Any] = []
    plain = RouterReplay.get_replay_topk

    def spied(self: Any, scores: torch.Tensor, topk: int, *rest: Any, **named: Any) -> Any:
        answer = plain(self, scores, topk, *rest, **named)
        routed.append((self.router_replay_action, scores.topk(topk, dim=1).indices.sort(1)[0], answer[1].sort(1)[0]))
        return answer

    RouterReplay.get_replay_topk = spied
    rollout = rollout.replace(old_log_probs=trainer.log_probs(rollout))
    halves = [rollout.select(range(8)), rollout.select(range(8, 16))]
    stats = [asdict(trainer.step(half)) for half in halves]
    return {
        "log_probs": [rollout.old_log_probs.numpy().copy()],
        "stats": stats,
        "weights": weights_of(trainer),
        "differently": sum(int((own != used).any(1).sum()) for _, own, used in routed),
        "actions": sorted({action.value for action, _, _ in routed if action is not None}),
    }


def steps(folder: Path, *options: str) -> dict[str, Any]:
    return run_ranks(world_of(options), two_steps, folder, options, join=False)[0]


@pytest.fixture(scope="module")
def expected(model_of):
    """family -> (folder, one process's training with replay)."""
    found: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in found:
            folder = model_of(family, 4 if family == "qwen3_moe" else 3)
            found[family] = folder, steps(folder, *FAR, *megatron(REPLAY))
        return found[family]

    return make


def test_routers_answer_what_was_recorded_although_weights_have_changed(expected):
    folder, with_replay = expected("qwen3_moe")
    assert with_replay["differently"] > 20, "the weights have not changed enough for this test to say anything"
    assert with_replay["actions"] == ["record", "replay_forward"]
    assert [s["metrics"]["routing_replayed"] for s in with_replay["stats"]] == [1.0, 1.0]
    without = steps(folder, *FAR, *megatron())
    assert "routing_replayed" not in without["stats"][0]["metrics"]
    apart = differences({**without, "stats": with_replay["stats"]}, with_replay, initial(folder))
    assert apart["log_probs"] == 0
    assert apart["update"] > 0.01


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", (*megatron(REPLAY), SMALL)),
        ("qwen3_moe", (*megatron(REPLAY, *FULL), SMALL)),
        ("qwen3_moe", (*megatron(REPLAY, processes=2), SMALL)),
        ("qwen3_moe", (*megatron(REPLAY, *SP, processes=2), SMALL)),
        ("qwen3_moe", megatron(REPLAY, *SP, EP, "expert_tensor_parallel_size=1", *FULL, processes=2)),
        ("qwen3_moe", (*megatron(REPLAY, PP, *FULL, processes=2), SMALL)),
        ("qwen3_moe", (*megatron(REPLAY, PP, "virtual_pipeline_model_parallel_size=2", *FULL, processes=2), SMALL)),
        ("qwen3_moe", megatron(REPLAY, "context_parallel_size=2", processes=2)),
        ("deepseek_v3", (*megatron(REPLAY, EP, *FULL, processes=2), SMALL)),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v[1:]),
)
def test_every_layout_replays_alike(expected, family, layout):
    folder, alone = expected(family)
    found = steps(folder, *FAR, *layout)
    assert ("replay_backward" in found["actions"]) == any("recompute" in option for option in layout)
    apart = differences(found, alone, initial(folder))
    assert apart["log_probs"] < 3e-5
    assert apart["stats"] < 3e-5
    assert apart["update"] < 2e-4


def partly_known(folder: Path, options: tuple[str, ...]) -> tuple[str, float]:
    """What is said of a batch of which half was recorded, and whether an unknown one is replayed."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch, other = made.batch(recipe), made.batch(recipe, seed=1)
    trainer.log_probs(batch.select(range(8)))
    with pytest.raises(SlimeError) as caught:
        trainer.step(batch)
    return str(caught.value), trainer.step(other).metrics["routing_replayed"]


def test_samples_without_a_record_are_told(model_of):
    [(said, replayed)] = run_ranks(1, partly_known, model_of("qwen3_moe", 4), megatron(REPLAY), join=False)
    assert "8 of 16 samples have no recorded experts" in said
    assert replayed == 0


def test_the_reference_routes_by_itself(model_of):
    """Its log-probs are those of a trainer without replay, and do not disturb what was recorded."""

    def work(folder: Path, options: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, float]:
        recipe = made.recipe(*options, "algo.kl_coef=0.1")
        trainer = open_trainer(recipe, folder, total_steps=10)
        batch = made.batch(recipe)
        before = trainer.log_probs(batch, "reference").numpy().copy()
        trainer.log_probs(batch)
        batch = batch.replace(ref_log_probs=trainer.log_probs(batch, "reference"))
        replayed = trainer.step(batch).metrics["routing_replayed"]
        return before, trainer.log_probs(batch, "reference").numpy().copy(), replayed

    [(before, after, replayed)] = run_ranks(1, work, model_of("qwen3_moe", 4), (*FAR, *megatron(REPLAY)), join=False)
    assert np.array_equal(before, after)
    assert replayed == 1
