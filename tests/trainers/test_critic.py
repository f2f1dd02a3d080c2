"""The critic: values, their gradient, warm-up, checkpoints and ranks."""

from __future__ import annotations

import pytest
import torch

from slimecli.algos import algorithm
from slimecli.errors import SlimeError
from tests.trainers import made
from tests.trainers.processes import run_ranks

OPTIONS = ("algo.name=ppo", "algo.value_clip=10", "algo.critic_lr=1e-2", "trainer.max_tokens_per_micro_batch=60")


def with_values(trainer, batch, *options):
    """As the loop prepares it."""
    section = made.recipe(*OPTIONS, *options).algo
    batch = batch.replace(values=trainer.log_probs(batch, "critic"))
    chosen = algorithm("ppo")
    return batch.replace(returns=chosen.returns(batch, section), advantages=chosen.advantages(batch, section))


def plain_batch(seed=0):
    return made.batch(made.recipe(), seed=seed)


def test_values_start_at_zero_and_learn_the_returns(qwen):
    """With lambda 1 and value_clip out of reach the return is the reward: the loss falls towards the values' error."""
    trainer = made.trainer(qwen, *OPTIONS)
    batch = plain_batch()
    ready = with_values(trainer, batch)
    assert ready.values.abs().max() == 0
    assert torch.equal(ready.returns[batch.loss_mask > 0], ready.advantages[batch.loss_mask > 0])
    losses = [trainer.step(with_values(trainer, batch)).metrics["value_loss"] for _ in range(12)]
    first = float((ready.returns.square() * batch.loss_mask).sum() / batch.loss_mask.sum())
    assert losses[0] == pytest.approx(first, rel=1e-5) and losses[-1] < 0.5 * losses[0]
    values = trainer.log_probs(batch, "critic")
    assert values[batch.loss_mask == 0].abs().max() == 0 and values.std() > 0


def test_a_value_depends_on_what_came_before_and_on_nothing_else(qwen):
    """Not on the sampled token, the neighbours in the batch, the temperature, nor on shared prefixes."""
    trainer = made.trainer(qwen, *OPTIONS)
    batch = plain_batch()
    trainer.step(with_values(trainer, batch))
    trainer.step(with_values(trainer, batch))
    values = trainer.log_probs(batch, "critic")
    assert values.abs().max() > 1e-3
    last = batch.select([0])
    changed = last.tokens.clone()
    changed[-1] = (changed[-1] + 1) % made.VOCAB
    other = last.replace(tokens=changed, targets=torch.cat([changed[1:], torch.zeros(1, dtype=torch.int64)]))
    assert torch.allclose(trainer.log_probs(other, "critic"), values[: last.num_tokens], atol=1e-5)
    hot = trainer.log_probs(batch.replace(temperature=3.0), "critic")
    assert torch.equal(hot, values)


def test_the_head_has_the_gradient_of_the_weighted_loss(qwen):
    """d loss / d head = sum_t weight_t 2 (V - R) h_t, with V = 0 at the start; Adam's first moment shows it."""
    trainer = made.trainer(qwen, *OPTIONS, "trainer.clip_grad=0")
    ready = with_values(trainer, plain_batch())
    trainer.step(ready)
    moment = trainer._state()["critic_exp_avg/head.weight"][0] / (1 - made.recipe().trainer.beta1)
    again = made.trainer(qwen, *OPTIONS, "trainer.clip_grad=0")
    head = again._critic.model.head.weight
    expected = torch.zeros_like(head[0])
    for i in range(len(head[0])):
        with torch.no_grad():
            head.zero_()
            head[0, i] = 1.0
        hidden = again.log_probs(ready, "critic")  # the i-th hidden unit at every position
        expected[i] = (ready.loss_weight * -2 * ready.returns * hidden).sum()
    assert torch.allclose(moment, expected, rtol=1e-3, atol=1e-5)


def test_in_the_warm_up_only_the_critic_learns(qwen):
    trainer = made.trainer(qwen, *OPTIONS, "algo.critic_warmup=2")
    start = made.weights(trainer)
    for step in (1, 2, 3):
        stats = trainer.step(with_values(trainer, plain_batch()))
        moved = made.gap(made.weights(trainer), start) > 0
        assert moved == (step > 2) and (stats.lr > 0) == (step > 2)
        assert stats.metrics["critic_grad_norm"] > 0 and stats.grad_norm > 0


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_resumed_critic_goes_on_as_if_nothing_had_been(qwen, tmp_path, warmup):
    options = (*OPTIONS, f"algo.critic_warmup={warmup}")
    trainer = made.trainer(qwen, *options)
    for seed in range(3):
        trainer.step(with_values(trainer, plain_batch(seed)))
    trainer.save(tmp_path)
    other = made.trainer(qwen, *options)
    other.load(tmp_path)
    for seed in (3, 4):
        ready = with_values(trainer, plain_batch(seed))
        assert torch.equal(other.log_probs(ready, "critic"), ready.values)
        assert other.step(ready) == trainer.step(ready)
    assert made.gap(made.weights(other), made.weights(trainer)) == 0


def test_published_weights_are_the_policys_alone(qwen, tmp_path):
    from slimecli.trainers._checkpoint import stored_shapes

    trainer, plain = made.trainer(qwen, *OPTIONS), made.trainer(qwen)
    assert [n for n, _ in trainer.weights()] == [n for n, _ in plain.weights()]
    trainer.save(tmp_path)
    assert set(stored_shapes(tmp_path)) == {n for n, _ in plain.weights()}
    with pytest.raises(SlimeError, match="holds no critic"):
        plain.log_probs(plain_batch(), "critic")
    with pytest.raises(SlimeError, match="no values"):
        trainer.step(plain_batch())


def work(folder, world, save=None):
    options = (*OPTIONS, "trainer.adam_eps=1e-3", f"trainer.processes={world}")
    trainer = made.trainer(folder, *options)
    seen = []
    for seed in (0, 1):
        ready = with_values(trainer, plain_batch(seed))
        stats = trainer.step(ready)
        seen.append((ready.values.numpy(), stats.metrics))
    if save:
        trainer.save(save)
    return seen, trainer.log_probs(plain_batch(2), "critic").numpy()


def test_two_processes_equal_one(qwen, tmp_path):
    one = work(qwen, 1)
    for seen, values in run_ranks(2, work, qwen, 2, tmp_path):
        for (a, left), (b, right) in zip(seen, one[0], strict=True):
            assert abs(a - b).max() < 1e-4 and left == pytest.approx(right, rel=1e-3, abs=1e-5)
        assert abs(values - one[1]).max() < 1e-4
    alone = made.trainer(qwen, *OPTIONS)
    alone.load(tmp_path)
    assert abs(alone.log_probs(plain_batch(2), "critic").numpy() - one[1]).max() < 1e-4
