"""A step's loss and gradient do not depend on how its samples are packed, cut into micro-batches or dealt to ranks."""

from __future__ import annotations

import pytest
import torch

from slimecli.algos import ALGORITHMS, algorithm
from slimecli.batch import plan_micro_batches
from slimecli.recipe_algo import AlgoSection, CorrectionSection
from tests.algos import made

CORRECTION = CorrectionSection(level="sequence", high=1.5, reject_level="geometric", reject_low=0.85, reject_high=1.15)
SECTIONS = {
    "plain": AlgoSection(),
    "everything": AlgoSection(
        kl_coef=0.1, kl_unbiased=True, entropy_coef=0.01, dual_clip=1.05, opsm_delta=0.01, correction=CORRECTION
    ),
    "kl in reward, token weights": AlgoSection(
        kl_coef=0.1, kl_place="reward", aggregation="token", gamma=0.9, correction=CorrectionSection(level="token")
    ),
    "constant": AlgoSection(aggregation="constant", correction=CorrectionSection(veto=0.6), whiten_advantages=True),
}
CASES = [(name, label) for name in ALGORITHMS for label in SECTIONS]


def whole(name, section):
    batch = made.ready(algorithm(name), section, made.random_batch())
    log_probs = made.policy(batch)
    loss = made.step_loss(algorithm(name), section, batch, log_probs)
    loss.backward()
    assert log_probs.grad.abs().max() > 0
    return batch, loss.detach(), log_probs.grad


def parts(name, section, batch, bins):
    """Sum of the losses of micro-batches, and the gradient gathered from them."""
    log_probs = made.policy(batch)
    bounds = batch.cu_seqlens.tolist()
    total = torch.zeros(())
    for indices in bins:
        if indices:
            places = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices])
            total = total + made.step_loss(algorithm(name), section, batch.select(indices), log_probs[places])
    total.backward()
    return total.detach(), log_probs.grad


@pytest.mark.parametrize(("name", "label"), CASES)
def test_sum_of_parts_is_the_whole(name, label):
    section = SECTIONS[label]
    batch, loss, gradient = whole(name, section)
    lengths = batch.lengths.tolist()
    one_each = [[i] for i in range(batch.num_samples)]
    backwards = [list(range(batch.num_samples))[::-1]]
    two_ranks = [indices for rank in plan_micro_batches(lengths, 12, 2) for indices in rank]
    three_ranks = [indices for rank in plan_micro_batches(lengths, 9, 3) for indices in rank]
    for bins in (one_each, backwards, two_ranks, three_ranks, [[3, 0, 7], [1], [9, 8, 2, 4, 5, 6]]):
        assert sorted(i for indices in bins for i in indices) == list(range(batch.num_samples))
        found, grad = parts(name, section, batch, bins)
        assert torch.allclose(found, loss, atol=1e-6), bins
        assert torch.allclose(grad, gradient, atol=1e-6), bins


def test_every_switch_of_the_sections_does_something():
    """Otherwise the test above would hold of nothing."""
    losses = {label: whole("grpo", section)[1].item() for label, section in SECTIONS.items()}
    assert len(set(losses.values())) == len(losses)
    batch = made.ready(algorithm("grpo"), AlgoSection(), made.random_batch())
    inputs = made.inputs(batch, made.policy(batch))
    _, metrics = algorithm("grpo").loss(inputs, SECTIONS["everything"])
    trained = batch.loss_mask > 0
    for name in ("clip_fraction", "dual_clip_fraction", "opsm_masked", "correction_outside", "correction_rejected"):
        assert 0 < metrics[name][trained].mean() < 1, name
    _, metrics = algorithm("grpo").loss(inputs, SECTIONS["constant"])
    assert 0 < metrics["correction_rejected"][trained].mean() < 1


def test_an_untrained_position_has_no_say():
    """Whatever stands where the mask is 0, the loss is the same."""
    for name in ALGORITHMS:
        section = SECTIONS["everything"]
        batch, loss, _ = whole(name, section)
        noise = torch.where(batch.loss_mask > 0, 0.0, -3.0)
        changed = batch.replace(
            old_log_probs=batch.old_log_probs + noise,
            ref_log_probs=batch.ref_log_probs + 2 * noise,
            rollout_log_probs=batch.rollout_log_probs - noise,
        )
        found = made.step_loss(algorithm(name), section, changed, made.policy(batch))
        assert torch.allclose(found, loss, atol=1e-6), name
