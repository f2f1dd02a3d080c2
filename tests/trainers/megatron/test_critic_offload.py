"""algo.critic_offload: policy and critic in turns on the device, with the bits of both being there."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimecli.errors import SlimeError
from slimecli.plan_megatron import megatron_bytes
from slimecli.trainers import open_trainer
from slimecli.trainers._offload import held_tensors
from tests.models import as_on_the_hub, tiny_model
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.megatron.test_critic import LAYOUTS, PPO, on_ranks, ready, steps
from tests.trainers.processes import run_ranks

AWAY = "algo.critic_offload=true"


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["stats"] == expected["stats"]
    assert all(np.array_equal(a, b) for a, b in zip(found["log_probs"], expected["log_probs"], strict=True))
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(np.array_equal(found["weights"][name], tensor) for name, tensor in expected["weights"].items())


@pytest.mark.parametrize("layout", ["one", "TP2 SP", "VPP2", "DP2 overlap", "EP2 replay"])
def test_it_learns_as_the_resident_one_bit_for_bit(model_of, layout):
    folder = model_of("qwen3_moe" if "EP2" in layout else "qwen3", 4)
    options = (*PPO, *LAYOUTS[layout], *(["algo.critic_warmup=1"] if layout == "TP2 SP" else []))
    assert_same(on_ranks(folder, *options, AWAY), on_ranks(folder, *options))


def test_with_prediction_layers_that_learn(tmp_path):
    """They are the policy's, and go with it."""
    folder = as_on_the_hub(tiny_model(tmp_path, "mimo", num_hidden_layers=4), "mimo")
    options = ("megatron.mtp_loss_scaling_factor=0.5", *PPO, *LAYOUTS["one"])
    assert_same(on_ranks(folder, *options, AWAY), on_ranks(folder, *options))


def with_frozen(folder: Path, options: tuple[str, ...]) -> list[np.ndarray]:
    """All that computes in the policy's place, before and after a step that is published, right after the critic's
    turn."""
    recipe = made.recipe(*PPO, "algo.old_log_probs=published", f"distill.teacher={folder}", *options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    seen = []
    for seed in (0, 1):
        batch = ready(trainer, recipe, seed)
        for name in ("reference", "old_policy", "teacher", "policy"):
            trainer.log_probs(batch, "critic")
            seen.append(trainer.log_probs(batch, name))
        trainer.step(batch)
        trainer.log_probs(batch, "critic")
        if seed == 0:
            weights_of(trainer)
    return [s.numpy().copy() for s in seen]


def test_frozen_models_and_published_weights_have_the_policy_in_its_place(model_of):
    folder = model_of("qwen3", 4)
    resident, away = (run_ranks(1, with_frozen, folder, (*megatron(), *more), join=False)[0] for more in ((), (AWAY,)))
    assert all(np.array_equal(a, b) for a, b in zip(away, resident, strict=True))
    reference, published, _, policy = away[4:]
    assert np.array_equal(published, policy) and np.abs(published - reference).max() > 1e-3


def test_checkpoints_fit_either_way(model_of, tmp_path):
    folder, options = model_of("qwen3", 4), ("algo.name=ppo", "algo.critic_lr=1e-2", *LAYOUTS["one"])
    whole = on_ranks(folder, *options, seeds=(0, 1, 2))
    expected = whole | {"stats": whole["stats"][2:], "log_probs": whole["log_probs"][4:]}
    for saves, loads in (((AWAY,), (AWAY, "")), ((), (AWAY,))):
        made_of = tmp_path / "".join(("made", *saves))
        on_ranks(folder, *options, *saves, save=made_of, seeds=(0, 1))
        for load in loads:
            assert_same(on_ranks(folder, *options, *filter(None, [load]), load=made_of, seeds=(2,)), expected)


def bytes_held(holder: object) -> int:
    """On the device, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held_tensors(holder)}
    return sum(s.nbytes() for s in storages.values())


def bytes_alive() -> int:
    """Of all tensors of this process but those in uint8, as which storages wait in host memory."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.dtype != torch.uint8:
            found[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return sum(found.values())


def memory(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Bytes after a step, each model's while it, and while the other one, has its turn; and of all that is alive."""
    recipe, before = made.recipe(*options), bytes_alive()
    trainer = open_trainer(recipe, folder, total_steps=5)
    if recipe.algo.name != "ppo":
        trainer.step(made.batch(recipe))
        return {"alive": bytes_alive() - before}
    batch = ready(trainer, recipe, 0)
    trainer.step(batch)
    trainer.log_probs(batch, "critic")
    found: dict[str, Any] = {"critic's": (bytes_held(trainer._policy), bytes_held(trainer._critic))}
    trainer.log_probs(batch)
    found["policy's"] = (bytes_held(trainer._policy), bytes_held(trainer._critic))
    del batch
    rows = megatron_bytes(recipe, trainer._spec, on_gpu=True)
    found["planned"] = {v.name: v.value for v in rows if v.group.startswith("host")}
    return found | {"alive": bytes_alive() - before}


@pytest.mark.parametrize("layout", ["one", "DP2 overlap"])
def test_the_one_whose_turn_it_is_not_has_nothing_on_the_device(model_of, layout):
    folder, options = model_of("qwen3", 4), LAYOUTS[layout]
    for away, resident, plain in zip(
        *(
            run_ranks(world_of(options), memory, folder, (*options, *more), join=False)
            for more in (("algo.name=ppo", AWAY), ("algo.name=ppo",), ())
        ),
        strict=True,
    ):
        policy, critic = resident["policy's"]
        assert policy > 1e6 < critic and resident["critic's"] == (policy, critic)
        assert away["policy's"] == (policy, 0) and away["critic's"] == (0, critic)
        assert resident["alive"] - plain["alive"] >= critic
        assert abs(away["alive"] - plain["alive"]) < 0.02 * critic, "as if there were no critic"
        planned = {"policy": policy, "critic": critic, "total": policy + critic}
        assert away["planned"] == pytest.approx(planned, rel=0.01) and resident["planned"] == {}


def slept(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Steps with a nap in each turn."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)

    def nap() -> None:
        trainer.sleep()
        assert bytes_held(trainer._policy) == 0 == bytes_held(trainer._critic)
        trainer.wake()

    nap()
    first = steps(trainer, recipe, (0,))
    nap()
    trainer.log_probs(made.batch(made.recipe()), "critic")
    nap()
    second = steps(trainer, recipe, (1,))
    return {
        "stats": first["stats"] + second["stats"],
        "log_probs": first["log_probs"][:-1] + second["log_probs"],
        "weights": second["weights"],
    }


def test_asleep_neither_is_there_and_awake_both_are_as_before(model_of):
    folder, options = model_of("qwen3", 4), (*PPO, *LAYOUTS["one"])
    assert_same(run_ranks(1, slept, folder, (*options, AWAY), join=False)[0], on_ranks(folder, *options))


def broken_off(folder: Path, options: tuple[str, ...], lacks: str) -> tuple[str, dict[str, Any]]:
    """A step that ends in the middle, then good ones."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = ready(trainer, recipe, 0)
    with pytest.raises(SlimeError) as caught:
        trainer.step(batch.replace(**{lacks: None}))
    return str(caught.value), steps(trainer, recipe, (0, 1))


def test_a_step_that_broke_off_leaves_nothing_behind(model_of):
    """No gradients, no experts to be replayed, and no model in the other's place."""
    folder = model_of("qwen3_moe", 4)
    options = (*PPO, *megatron("moe_enable_routing_replay=true"))
    expected = on_ranks(folder, *options)
    for lacks, where in (("advantages", ()), ("advantages", (AWAY,)), ("values", (AWAY,))):
        [(said, found)] = run_ranks(1, broken_off, folder, (*options, *where), lacks, join=False)
        assert f"no {lacks}" in said
        assert_same(found, expected)


def test_a_critic_of_another_step_than_the_policys_is_refused(model_of, tmp_path):
    folder, options = model_of("qwen3", 4), (*PPO, *LAYOUTS["one"], AWAY)
    on_ranks(folder, *options, save=tmp_path / "one", seeds=(0,))
    on_ranks(folder, *options, save=tmp_path / "two", seeds=(0, 1))
    shutil.rmtree(tmp_path / "two" / "critic")
    shutil.copytree(tmp_path / "one" / "critic", tmp_path / "two" / "critic")
    with pytest.raises(AssertionError, match=r"DataError: .*critic is of optimizer step 1, and the policy .* of 2"):
        on_ranks(folder, *options, load=tmp_path / "two", seeds=())


def poisoned(folder: Path, options: tuple[str, ...]) -> tuple[list[str], dict[str, Any]]:
    """A step whose critic has no gradient, one whose policy has none, then good ones."""
    recipe, said = made.recipe(*options), []
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = ready(trainer, recipe, 0)
    for what in ("returns", "advantages"):
        with pytest.raises(SlimeError) as caught:
            trainer.step(batch.replace(**{what: getattr(batch, what) * float("nan")}))
        said.append(str(caught.value))
    return said, steps(trainer, recipe, (0, 1))


@pytest.mark.parametrize("where", [(), (AWAY,)])
def test_a_gradient_that_is_no_number_leaves_both_models_as_they_were(model_of, where):
    folder, options = model_of("qwen3", 4), (*PPO, *LAYOUTS["one"])
    [(said, found)] = run_ranks(1, poisoned, folder, (*options, *where), join=False)
    assert len(said) == 2 and all("the weights are as before the step" in text for text in said)
    assert_same(found, on_ranks(folder, *options))
