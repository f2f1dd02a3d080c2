"""Two gloo processes against one."""

from __future__ import annotations

import pytest

from tests.trainers import made
from tests.trainers.processes import run_ranks

OPTIONS = ("trainer.max_tokens_per_micro_batch=60", "algo.kl_coef=0.1", "trainer.weight_decay=0.1")


def work(folder, world, *extra, save="", load="", seeds=(0, 1, 2), count=4):
    """(stats, log-probs, weights) of some steps."""
    options = (*OPTIONS, f"trainer.processes={world}", *extra)
    trainer = made.trainer(folder, *options)
    if load:
        trainer.load(load)
    stats, log_probs = [], []
    for seed in seeds:
        batch = made.batch(made.recipe(*options), seed=seed, count=count)
        log_probs.append(trainer.log_probs(batch).numpy())
        batch = batch.replace(ref_log_probs=trainer.log_probs(batch, "reference"))
        stats.append(trainer.step(batch))
    if save:
        trainer.save(save)
    return stats, log_probs, {n: t.detach().numpy().copy() for n, t in trainer.weights()}


def close(a, b):
    for x, y in zip(a[0], b[0], strict=True):
        assert y.loss == pytest.approx(x.loss, abs=1e-5)
        assert y.grad_norm == pytest.approx(x.grad_norm, rel=1e-5)
        assert y.metrics == pytest.approx(x.metrics, rel=1e-4, abs=1e-5)
        assert (x.tokens, x.lr) == (y.tokens, y.lr)
    for x, y in zip(a[1], b[1], strict=True):
        assert abs(x - y).max() < 1e-5
    assert list(a[2]) == list(b[2])
    assert max(abs(a[2][k] - b[2][k]).max() for k in a[2]) < 1e-5


def test_two_processes_equal_one(qwen, llama):
    for folder in (qwen, llama):
        one = work(folder, 1)
        for rank in run_ranks(2, work, folder, 2):
            close(one, rank)


def test_the_trainer_enters_the_group_that_torchrun_describes(qwen):
    assert run_ranks(2, rank_and_world, qwen, join=False) == [(0, 2), (1, 2)]


def rank_and_world(folder):
    trainer = made.trainer(folder, "trainer.processes=2")
    return trainer._rank, trainer._world


def test_more_ranks_than_samples(qwen):
    """The rank without a sample takes part in the collectives and adds nothing."""
    one = work(qwen, 1, "algo.std_normalization=false", seeds=(0,), count=1)
    close(one, run_ranks(5, tiny_work, qwen)[4])


def tiny_work(folder):
    return work(folder, 5, "algo.std_normalization=false", seeds=(0,), count=1)


def test_activation_checkpointing_under_sharding(qwen):
    close(work(qwen, 1), run_ranks(2, checkpointed, qwen)[0])


def checkpointed(folder):
    return work(folder, 2, "trainer.activation_checkpointing=true")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_checkpoint_loads_at_another_world_size(qwen, tmp_path, before, after):
    straight = work(qwen, 1, seeds=(0, 1, 2, 3))
    for world, options in ((before, {"save": tmp_path, "seeds": (0, 1)}), (after, {"load": tmp_path, "seeds": (2, 3)})):
        found = run_ranks(world, in_world, qwen, world, options)
    stats, log_probs, weights = straight
    close((stats[2:], log_probs[2:], weights), found[0])


def in_world(folder, world, options):
    return work(folder, world, **options)


def test_a_nan_stops_every_rank(qwen):
    assert run_ranks(2, broken, qwen) == [True, True]


def broken(folder):
    from slimecli.errors import SlimeError

    trainer = made.trainer(folder, "trainer.processes=2")
    batch = made.batch(made.recipe())
    before = made.weights(trainer)
    try:
        trainer.step(batch.replace(advantages=batch.advantages * float("nan")))
    except SlimeError as error:
        return "model." in error.what and made.gap(before, made.weights(trainer)) == 0
    return False
