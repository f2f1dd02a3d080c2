"""Teacher and old policy of the FSDP trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimecli.errors import DataError, SlimeError
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.processes import run_ranks


def test_a_teacher_of_any_shape_says_its_own_log_probs(qwen, llama):
    trainer = made.trainer(qwen, f"distill.teacher={llama}")
    batch = made.batch(made.recipe())
    before = trainer.log_probs(batch)
    found = trainer.log_probs(batch, "teacher")
    assert torch.equal(found, made.trainer(llama).log_probs(batch))
    trainer.step(batch)
    assert torch.equal(trainer.log_probs(batch, "teacher"), found)
    assert (trainer.log_probs(batch) - before).abs().max() > 1e-3


def test_the_old_policy_is_what_was_published(qwen):
    trainer = made.trainer(qwen, "algo.old_log_probs=published")
    batch = made.batch(made.recipe())
    first = trainer.log_probs(batch)
    assert torch.equal(trainer.log_probs(batch, "old_policy"), first)
    trainer.step(batch)
    second = trainer.log_probs(batch)
    for _ in range(2):
        assert torch.equal(trainer.log_probs(batch, "old_policy"), first)
        assert torch.equal(trainer.log_probs(batch), second)
    next(trainer.weights())
    assert torch.equal(trainer.log_probs(batch, "old_policy"), first), "not published to the end"
    made.weights(trainer)
    assert torch.equal(trainer.log_probs(batch, "old_policy"), second)
    assert not torch.equal(first, second)


def test_after_a_resume_it_is_the_checkpoints(qwen, tmp_path):
    trainer = made.trainer(qwen, "algo.old_log_probs=published")
    batch = made.batch(made.recipe())
    trainer.step(batch)
    trainer.save(tmp_path)
    again = made.trainer(qwen, "algo.old_log_probs=published")
    again.load(tmp_path)
    assert torch.equal(again.log_probs(batch, "old_policy"), trainer.log_probs(batch))


def on_a_rank(folder, teacher, world):
    options = ("algo.old_log_probs=published", f"distill.teacher={teacher}", "trainer.adam_eps=1e-2")
    trainer = made.trainer(folder, *options, f"trainer.processes={world}")
    batch = made.batch(made.recipe())
    seen = [trainer.log_probs(batch, "teacher"), trainer.log_probs(batch)]
    trainer.step(batch)
    seen += [trainer.log_probs(batch, "old_policy"), trainer.log_probs(batch), trainer.log_probs(batch, "old_policy")]
    made.weights(trainer)
    trainer.step(batch)
    seen += [trainer.log_probs(batch, "old_policy"), trainer.log_probs(batch), trainer.log_probs(batch, "teacher")]
    return [s.numpy() for s in seen]


def test_two_processes_equal_one(qwen, llama):
    alone = on_a_rank(qwen, llama, 1)
    assert np.abs(alone[1] - alone[3]).max() > 1e-3 < np.abs(alone[3] - alone[6]).max()
    for rank in run_ranks(2, on_a_rank, qwen, llama, 2):
        assert max(np.abs(a - b).max() for a, b in zip(rank, alone, strict=True)) < 1e-4
        for old, then in ((2, 1), (4, 1), (5, 3)):
            assert np.abs(rank[old] - rank[then]).max() < 1e-5


def test_what_is_not_held_is_told(qwen, tmp_path):
    batch = made.batch(made.recipe())
    for name, fix in (("teacher", "distill.teacher"), ("old_policy", "algo.old_log_probs")):
        with pytest.raises(SlimeError, match="this trainer holds no") as caught:
            made.trainer(qwen).log_probs(batch, name)
        assert fix in caught.value.fix
    small = tiny_model(tmp_path, "llama", vocab=270)
    with pytest.raises(DataError, match="is none of the teacher's, whose embedding has 270 rows"):
        made.trainer(qwen, f"distill.teacher={small}").log_probs(batch, "teacher")
