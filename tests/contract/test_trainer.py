"""What the loop relies on, over every trainer that can be opened here."""

from __future__ import annotations

import inspect

import pytest
import torch

import tests.megatron  # noqa: F401
from slimecli.errors import SlimeError
from slimecli.protocols import Trainer
from slimecli.trainers import TRAINERS, open_trainer
from slimecli.trainers._offload import held_tensors
from slimecli.types import StepStats
from slimecli.weights.fingerprint import fingerprint
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=TRAINERS)
def backend(request):
    return request.param


def in_a_child(backend, check, folder, tmp_path):
    """Run `check` in a forked process: the Megatron backend answers for the GPU there, which must not be seen here."""
    run_ranks(1, _opened, backend, check, folder, tmp_path, join=False)


def _opened(backend, check, folder, tmp_path):
    options = (f"trainer.backend={backend}", "algo.kl_coef=0.05", "trainer.lr_schedule=linear")
    recipe = made.recipe(*options)

    def opened():
        return open_trainer(recipe, folder, total_steps=4)

    trainer = opened()
    wanted = {"trainer": trainer, "batch": made.batch(recipe), "opened": opened, "tmp_path": tmp_path}
    check(**{name: wanted[name] for name in inspect.signature(check).parameters})
    trainer.close()
    trainer.close()


def with_reference(trainer, batch):
    return batch.replace(ref_log_probs=trainer.log_probs(batch, model="reference"))


def check_signatures_are_the_protocols(trainer):
    assert isinstance(trainer, Trainer)
    for name in ("log_probs", "step", "weights", "save", "load", "close"):
        asked = list(inspect.signature(getattr(Trainer, name)).parameters)[1:]
        assert list(inspect.signature(getattr(trainer, name)).parameters) == asked, name


def check_log_probs(trainer, batch):
    found = trainer.log_probs(batch)
    assert (found.shape, found.dtype, found.device.type) == ((batch.num_tokens,), torch.float32, "cpu")
    assert not found.requires_grad
    assert (found[batch.loss_mask > 0] < 0).all()
    assert found[batch.loss_mask == 0].abs().max() == 0
    assert torch.equal(found, trainer.log_probs(batch, model="reference"))


def check_temperature_divides_the_logits(trainer, batch):
    hot, cold = (trainer.log_probs(batch.replace(temperature=t)) for t in (100.0, 0.5))
    trained = batch.loss_mask > 0
    assert hot[trained] == pytest.approx(torch.full((int(trained.sum()),), -5.7), abs=0.2)
    assert (hot - cold)[trained].abs().max() > 1


def check_step_reports_and_follows_the_schedule(trainer, batch):
    stats = [trainer.step(with_reference(trainer, batch)) for _ in range(4)]
    assert all(isinstance(s, StepStats) for s in stats)
    assert [s.lr for s in stats] == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.0])
    assert {s.tokens for s in stats} == {int((batch.loss_weight > 0).sum())}
    assert all(s.grad_norm > 0 for s in stats)
    for key in ("entropy", "kl", "ppo_kl", "clip_fraction", "logprob_gap", "logprob_gap_max"):
        assert all(isinstance(s.metrics[key], float) for s in stats), key
    assert stats[0].metrics["kl"] == 0
    assert stats[1].metrics["kl"] > 0


def check_weights_come_in_one_order_and_change_with_steps_only(trainer, batch):
    first, names = fingerprint(trainer.weights()), [n for n, _ in trainer.weights()]
    trainer.log_probs(batch)
    assert fingerprint(trainer.weights()) == first
    assert [n for n, _ in trainer.weights()] == names
    assert len(set(names)) == len(names)
    trainer.step(with_reference(trainer, batch))
    assert fingerprint(trainer.weights()) != first


def check_load_is_the_inverse_of_save(trainer, batch, opened, tmp_path):
    batch = with_reference(trainer, batch)
    trainer.step(batch)
    trainer.save(tmp_path)
    expected = trainer.step(batch)
    other = opened()
    other.load(tmp_path)
    assert other.step(batch) == expected
    assert fingerprint(other.weights()) == fingerprint(trainer.weights())


def check_sleep_gives_memory_up_and_wake_brings_back_every_bit(trainer, batch, opened):
    held = [t for t in held_tensors(trainer) if t.requires_grad]
    for tensor in held:
        if not tensor.untyped_storage().resizable():  # what was read from a file on a CPU; a GPU's memory always is
            tensor.data = tensor.data.clone()
    batch = with_reference(trainer, batch)
    first = trainer.step(batch)
    trainer.sleep()
    trainer.sleep()
    assert len(held) > 4 and sum(t.untyped_storage().nbytes() for t in held) == 0
    trainer.wake()
    trainer.wake()
    second = trainer.step(batch)
    other = opened()
    assert [other.step(batch), other.step(batch)] == [first, second]
    assert fingerprint(other.weights()) == fingerprint(trainer.weights())


def check_calls_while_it_sleeps_are_refused_by_name(trainer, batch, opened, tmp_path):
    batch = with_reference(trainer, batch)
    first = trainer.step(batch)
    trainer.sleep()
    calls = {
        "log_probs": lambda: trainer.log_probs(batch),
        "step": lambda: trainer.step(batch),
        "weights": trainer.weights,  # before the first is asked for: ranks must not part in the middle
        "save": lambda: trainer.save(tmp_path),
        "load": lambda: trainer.load(tmp_path),
    }
    for name, call in calls.items():
        with pytest.raises(SlimeError, match=f"the trainer sleeps.*`{name}`") as caught:
            call()
        assert "wake" in caught.value.fix
    trainer.wake()
    other = opened()
    assert [other.step(batch), other.step(batch)] == [first, trainer.step(batch)], "nothing was touched"


CHECKS = [
    check_calls_while_it_sleeps_are_refused_by_name,
    check_sleep_gives_memory_up_and_wake_brings_back_every_bit,
    check_signatures_are_the_protocols,
    check_log_probs,
    check_temperature_divides_the_logits,
    check_step_reports_and_follows_the_schedule,
    check_weights_come_in_one_order_and_change_with_steps_only,
    check_load_is_the_inverse_of_save,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(backend, check, folder, tmp_path):
    in_a_child(backend, check, folder, tmp_path)
