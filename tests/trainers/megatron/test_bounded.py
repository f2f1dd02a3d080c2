"""What is never held whole: the logits of a micro-batch, and the model while its weights are handed out."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimecli.trainers import open_trainer
from slimecli.trainers.megatron import weights
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import LIKE_SGD, differences, megatron, observe, world_of
from tests.trainers.processes import run_ranks

TP2, PP2 = (f"{name}_model_parallel_size=2" for name in ("tensor", "pipeline"))
SP, EP2, ETP1 = "sequence_parallel=true", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"
CHUNK = 7
PADDED = 384
"""rows of the tiny models' embedding"""
BUCKET = 80_000
"""bytes: the largest tensor of a tiny model, and a small part of all"""


class Watch(TorchDispatchMode):
    """Every tensor that is made inside."""

    def __init__(self, trainer: Any, *, width: int = 0) -> None:
        """Args:
        trainer: views of its parameters are no new tensors.
        width: of tensors [rows, width], the most rows are noted.
        """
        super().__init__()
        self.rows = 0
        self.peak = 0
        """most bytes alive at a time"""
        self._width = width
        self._alive = 0
        own = (p.data for chunk in trainer._policy.bare for p in chunk.parameters())
        self._own = {t.untyped_storage()._cdata for t in own}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._own:
                if tensor.ndim == 2 and tensor.shape[1] == self._width:
                    self.rows = max(self.rows, len(tensor))
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._alive += size
            self.peak = max(self.peak, self._alive)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def rows_of_logits(folder: Path, options: tuple[str, ...]) -> tuple[int, int]:
    """On one rank: the most rows of logits at a time in log-probs and in a step, and how many tokens are trained."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    width = PADDED // trainer._settings.layout.tp
    with Watch(trainer, width=width) as watch:
        trainer.log_probs(batch)
        trainer.step(batch)
    return watch.rows, int(batch.loss_mask.sum())


@pytest.mark.parametrize("layout", [megatron(), megatron(TP2, processes=2)], ids=["one", "TP2"])
def test_logits_are_held_a_chunk_at_a_time_and_the_result_is_that_of_all(tmp_path, layout):
    # the output layer is its own, so that gradients are added up over chunks; nothing else has its width
    folder = tiny_model(tmp_path, "llama", intermediate_size=96)
    options = (*LIKE_SGD, "algo.entropy_coef=0.01")
    chunked = (*options, *layout, f"trainer.logits_chunk_tokens={CHUNK}")
    for rows, trained in run_ranks(world_of(layout), rows_of_logits, folder, chunked, join=False):
        assert rows == CHUNK and trained > 9 * CHUNK
    apart = differences(observe(folder, chunked), observe(folder, options), initial(folder))
    assert apart["log_probs"] < 3e-5 and apart["stats"] < 5e-6 and apart["update"] < 5e-5, apart


def handed_out(folder: Path, options: tuple[str, ...]) -> tuple[int, int, int]:
    """On one rank: the most bytes alive while weights are handed out, those of the largest and of all of them."""
    trainer = open_trainer(made.recipe(*options), folder, total_steps=10)
    weights.BUCKET_BYTES = BUCKET
    sizes = []
    with Watch(trainer) as watch:
        for _, tensor in trainer.weights():
            sizes.append(tensor.nbytes)
    return watch.peak, max(sizes), sum(sizes)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", megatron()),
        ("qwen3", megatron(TP2, processes=2)),
        ("qwen3", megatron(PP2, processes=2)),
        ("qwen3_moe", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v[2:]) or "one",
)
def test_weights_are_handed_out_a_bucket_at_a_time(model_of, family, layout):
    """A bucket is in memory once; beside it are the one before it, and a tensor that is cut out of it."""
    for peak, largest, whole in run_ranks(world_of(layout), handed_out, model_of(family, 4), layout, join=False):
        assert BUCKET < peak < 3 * max(BUCKET, largest), (peak, largest, whole)
        assert whole > 5 * max(BUCKET, largest)
