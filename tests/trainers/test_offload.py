"""Device memory given up and taken back: bit for bit, for one model at a time, and whole where something fails."""

from __future__ import annotations

import pytest
import torch

from slimecli.trainers import _offload
from slimecli.trainers._frozen import HostCopy
from slimecli.trainers._offload import OneAtATime, Resting, held_tensors

CPU = torch.device("cpu")


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """A flat buffer with two views, and a tensor of its own."""
    torch.manual_seed(seed)
    flat = torch.randn(10)
    return {"flat": flat, "first": flat[:4], "rest": flat[4:].view(2, 3), "alone": torch.randn(3, dtype=torch.float64)}


def values(holder: dict[str, torch.Tensor]) -> list[list[float]]:
    return [t.tolist() for t in holder.values()]


def sizes(holder: object) -> list[int]:
    return [t.untyped_storage().nbytes() for t in held_tensors(holder)]


def test_views_come_back_as_views():
    held = model()
    before, resting = values(held), Resting(held, CPU)
    assert resting.leave() == 10 * 4 + 3 * 8 and sum(sizes(held)) == 0
    assert resting.leave() == 0
    resting.back()
    resting.back()
    assert values(held) == before
    held["flat"].fill_(1.0)
    assert held["rest"].tolist() == [[1.0] * 3] * 2


class FusedAdam(torch.optim.Adam):
    """An optimizer of a package that we know nothing of, as Transformer Engine's."""


def test_an_optimizers_state_goes_too_whoever_wrote_the_optimizer():
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = FusedAdam([weight])
    weight.grad = torch.ones(5)
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    resting = Resting({"optimizer": optimizer}, CPU)
    resting.leave()
    assert moment.untyped_storage().nbytes() == weight.untyped_storage().nbytes() == 0
    resting.back()
    assert moment.tolist() == pytest.approx([0.1] * 5)


@pytest.mark.parametrize("last", [0, 1])
def test_a_host_without_room_leaves_everything_where_it_was(monkeypatch, last):
    held = model()
    before, resting, copy, made = values(held), Resting(held, CPU), _offload._host_copy, []

    def full(storage):
        made.append(storage)
        if len(made) > last:
            raise MemoryError("no room")
        return copy(storage)

    monkeypatch.setattr(_offload, "_host_copy", full)
    with pytest.raises(MemoryError):
        resting.leave()
    assert values(held) == before
    monkeypatch.setattr(_offload, "_host_copy", copy)
    assert resting.leave() > 0 and sum(sizes(held)) == 0
    resting.back()
    assert values(held) == before


@pytest.mark.parametrize("last", [0, 1])
def test_a_device_without_room_loses_nothing(monkeypatch, last):
    held = model()
    before, resting, plain, made = values(held), Resting(held, CPU), _offload._bytes_of, []
    resting.leave()

    def full(storage):
        made.append(storage)
        if len(made) > last:
            raise torch.OutOfMemoryError("no room")
        return plain(storage)

    monkeypatch.setattr(_offload, "_bytes_of", full)
    with pytest.raises(torch.OutOfMemoryError):
        resting.back()
    monkeypatch.setattr(_offload, "_bytes_of", plain)
    assert resting.leave() == 0, "what waits is not overwritten by what is not there"
    resting.back()
    assert values(held) == before


def test_of_several_one_is_there():
    one, two = model(1), model(2)
    before = values(one), values(two)
    turns = OneAtATime(CPU)
    turns.take("nobody gives way while there is no member")
    turns.join("one", one)
    turns.join("two", two)
    assert sum(sizes(one)) == sum(sizes(two)) == 0
    for name in ("one", "two", "two", "one"):
        turns.take(name)
        there, away = (one, two) if name == "one" else (two, one)
        assert sum(sizes(away)) == 0 and values(there) == before[name == "two"]
    one["alone"].zero_()
    turns.take("two")
    turns.take("one")
    assert one["alone"].tolist() == [0.0] * 3
    with pytest.raises(KeyError):
        turns.take("three")


def test_weights_that_could_not_all_be_swapped_in_are_swapped_out_again(monkeypatch):
    held = model()
    frozen = HostCopy(lambda: [held["flat"], held["alone"]])
    for tensor in (held["flat"], held["alone"]):
        tensor.mul_(2)
    before, plain, made = values(held), torch.Tensor.copy_, []

    def full(target, value, *more):
        made.append(target)
        if len(made) == 4:  # the policy's own two are in host memory, one frozen tensor is in their place
            raise torch.OutOfMemoryError("no room")
        return plain(target, value, *more)

    monkeypatch.setattr(torch.Tensor, "copy_", full)
    with pytest.raises(torch.OutOfMemoryError), frozen.swapped_in():
        raise AssertionError("computed with half of them")
    assert values(held) == before
