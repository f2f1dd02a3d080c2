"""Prediction layers in training: their loss is plain torch's in every layout, and the policy learns as without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimecli.errors import DataError
from slimecli.model_specs import get_spec
from slimecli.plan_megatron import megatron_bytes
from slimecli.trainers import open_trainer
from slimecli.trainers.megatron.arguments import settings_of
from slimecli.trainers.megatron.shares import prediction_parameters
from slimecli.weights.check import spec_of
from slimecli.weights.convert import torch_dist_to_hf
from slimecli.weights.hf import HfFolder
from slimecli.weights.torch_dist import find_iteration
from tests.megatron.harness import World, run
from tests.models import as_on_the_hub, edit_json, tiny_model
from tests.trainers import made
from tests.trainers.megatron.conftest import initial, tame
from tests.trainers.megatron.plain_prediction import of_plain_torch
from tests.trainers.megatron.ranks import LIKE_SGD, megatron, weights_of, world_of
from tests.trainers.megatron.test_prediction import COPIES, load_by_megatron, without_the_layer
from tests.trainers.processes import run_ranks

FACTOR = 0.5
ON = (f"megatron.mtp_loss_scaling_factor={FACTOR}",)
FREE = ("trainer.clip_grad=0", "trainer.weight_decay=0")
"""the gradient norm that clips is of policy and prediction layers together"""
TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
SP, VPP2 = "sequence_parallel=true", "virtual_pipeline_model_parallel_size=2"
UNEVEN = "decoder_first_pipeline_num_layers=1"
OVERLAP = ("overlap_grad_reduce=true", "overlap_param_gather=true")
BIAS = "e_score_correction_bias"
"""of routers; no gradient moves it"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """(family, config changes) -> (folder with prediction layers, the names of their tensors)."""
    found: dict[Any, Any] = {}

    def make(family: str, **changes: Any) -> tuple[Path, set[str]]:
        key = (family, *changes.items())
        if key not in found:
            folder = tame(tiny_model(tmp_path_factory.mktemp(family), family, **changes), family)
            plain = set(load_file(folder / "model.safetensors"))
            as_on_the_hub(folder, family)
            found[key] = folder, set(load_file(folder / "model.safetensors")) - plain
        return found[key]

    return make


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model with two prediction layers, of small norms, so that rounding stays small."""
    folder = as_on_the_hub(tiny_model(tmp_path_factory.mktemp("deep"), "mimo", num_hidden_layers=4), "mimo")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in weights if n.startswith("model.mtp_layers.0.")]:
        for other in (name, name.replace("layers.0", "layers.1")):
            noise = 0.15 * torch.randn(weights[name].shape, generator=generator)
            weights[other] = 1 + noise if "norm.weight" in name else noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", num_nextn_predict_layers=2)
    return folder


def taught(folder: Path, options: tuple[str, ...], steps: int = 1, out: Path | None = None) -> dict[str, Any]:
    """Weights and statistics after steps on the same batch; with `out`, saved there after the first."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch, stats = made.batch(recipe), []
    for _ in range(steps):
        stats.append(trainer.step(batch))
        if out is not None and len(stats) == 1:
            trainer.save(out)
    return {
        "weights": weights_of(trainer),
        "mtp_loss": [s.metrics.get("mtp_loss") for s in stats],
        "loss": [s.loss for s in stats],
        "log_probs": trainer.log_probs(batch).numpy().copy(),
    }


def on_ranks(work: Any, folder: Path, options: tuple[str, ...], *more: Any) -> Any:
    return run_ranks(world_of(options), work, folder, options, *more, join=False)[0]


# -- the loss, in plain torch ------------------------------------------------------------------------------------------


LAYOUTS = {
    "one": megatron(),
    "small micro-batches": (*megatron(), "trainer.max_tokens_per_micro_batch=24"),
    "recomputed": (*megatron(), "trainer.activation_checkpointing=true"),
    "TP2": megatron(TP2, processes=2),
    "SP": megatron(TP2, SP, processes=2),
    "PP2": megatron(PP2, processes=2),
    "PP2 VPP2": megatron(PP2, VPP2, processes=2),
    "CP2": megatron(CP2, processes=2),
    "DP2": (*megatron(processes=2), "trainer.max_tokens_per_micro_batch=24"),
    "DP2 overlapped": megatron(*OVERLAP, processes=2),
    "PP2 overlapped, recomputed in blocks": megatron(
        *(PP2, *OVERLAP, "recompute_granularity=full", "recompute_method=block", "recompute_num_layers=1"), processes=2
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_plain_torch(deep, layout):
    options = (*LAYOUTS[layout], *ON, *LIKE_SGD, *FREE)
    surprise, gradients = of_plain_torch(deep, made.batch(made.recipe(*options)), FACTOR)
    seen = on_ranks(taught, deep, options)
    assert abs(seen["mtp_loss"][0] - surprise) < 1e-5
    before, errors = initial(deep), {}
    for name, gradient in gradients.items():
        step = (-3e3 * gradient / (gradient.abs() + 1e3)).numpy()
        errors[name] = float(np.linalg.norm(seen["weights"][name] - before[name] - step) / np.linalg.norm(step))
    assert len(errors) == 32
    assert {name: error for name, error in errors.items() if error > 1e-3} == {}


# -- the policy --------------------------------------------------------------------------------------------------------

POLICIES = {
    "mimo": ("mimo", {}, megatron()),
    "mimo TP2": ("mimo", {}, megatron(TP2, processes=2)),
    "mimo PP2 overlapped": ("mimo", {}, megatron(PP2, UNEVEN, *OVERLAP, processes=2)),
    "mimo CP2": ("mimo", {}, megatron(CP2, processes=2)),
    "mimo tied PP2": ("mimo", {"tie_word_embeddings": True}, megatron(PP2, UNEVEN, processes=2)),
    "deepseek_v3 SP": ("deepseek_v3", {}, megatron(TP2, SP, processes=2)),
    "glm4_moe DP2": ("glm4_moe", {}, megatron(processes=2)),
    "qwen3_next PP2": ("qwen3_next", {}, megatron(PP2, processes=2)),
    "qwen3_5": ("qwen3_5", {}, megatron()),
}


@pytest.mark.parametrize("case", POLICIES)
def test_the_policy_learns_as_without(hub, case):
    family, changes, layout = POLICIES[case]
    folder, layers = hub(family, **changes)
    seen, plain = (on_ranks(taught, folder, (*layout, *FREE, *on), 3) for on in (ON, ()))
    assert seen["weights"].keys() == plain["weights"].keys()
    assert [
        n for n, w in plain["weights"].items() if n not in layers - COPIES and not np.array_equal(seen["weights"][n], w)
    ] == []
    assert seen["loss"] == plain["loss"]
    assert np.array_equal(seen["log_probs"], plain["log_probs"])
    still = [n for n in layers - COPIES if np.array_equal(seen["weights"][n], plain["weights"][n])]
    assert [n for n in still if BIAS not in n] == []
    assert plain["mtp_loss"] == [None] * 3


def taught_alone(folder: Path, options: tuple[str, ...]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The layers' loss over steps in which the policy stands still, and the weights at the end."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    batch = batch.replace(advantages=torch.zeros_like(batch.advantages))
    return [trainer.step(batch).metrics["mtp_loss"] for _ in range(5)], weights_of(trainer)


@pytest.mark.parametrize(
    "case", ["mimo", "mimo tied PP2", "deepseek_v3 SP", "glm4_moe DP2", "qwen3_next PP2", "qwen3_5"]
)
def test_the_layers_learn(hub, case):
    family, changes, layout = POLICIES[case]
    folder, layers = hub(family, **changes)
    losses, weights = on_ranks(taught_alone, folder, (*layout, *FREE, *ON))
    assert all(a > b for a, b in pairwise(losses)), losses
    moved = {name for name, value in initial(folder).items() if not np.array_equal(weights[name], value)}
    assert moved == {name for name in layers - COPIES if BIAS not in name}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def go_on(folder: Path, options: tuple[str, ...], checkpoint: Path, steps: int) -> dict[str, np.ndarray]:
    """Weights after some steps from a checkpoint."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    trainer.load(checkpoint)
    for _ in range(steps):
        trainer.step(made.batch(recipe))
    return weights_of(trainer)


def refusal(folder: Path, options: tuple[str, ...], checkpoint: Path) -> str:
    """Why a checkpoint cannot be gone on from."""
    try:
        go_on(folder, options, checkpoint, 0)
    except DataError as error:
        return error.what
    return ""


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_a_resumed_run_is_the_uninterrupted_one(hub, tmp_path, family):
    folder, layers = hub(family)
    options = (*megatron(TP2, SP, processes=2), *ON)
    out = tmp_path / "checkpoint"
    out.mkdir()
    whole = on_ranks(taught, folder, options, 2, out)["weights"]
    again = on_ranks(go_on, folder, options, out, 1)
    assert all(np.array_equal(again[name], value) for name, value in whole.items())
    first = on_ranks(go_on, folder, options, out, 0)
    elsewhere = on_ranks(go_on, folder, (*megatron(PP2, UNEVEN, processes=2), *ON), out, 0)
    assert all(np.array_equal(elsewhere[name], value) for name, value in first.items())
    torch_dist_to_hf(out, tmp_path / "hf")
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == first.keys() - COPIES
    assert all(np.array_equal(first[name], tensor.numpy()) for name, tensor in converted.items())
    moved = [n for n in layers & converted.keys() if not np.array_equal(first[n], initial(folder)[n])]
    assert len(moved) > 8


def test_megatron_itself_loads_what_was_trained(hub, tmp_path):
    folder, _ = hub("mimo")
    out = tmp_path / "checkpoint"
    out.mkdir()
    on_ranks(taught, folder, (*megatron(), *ON), 1, out)
    torch_dist_to_hf(out, tmp_path / "hf")
    run(World(), load_by_megatron, tmp_path / "hf", find_iteration(out))


@pytest.mark.parametrize("saved", [ON, ()])
def test_a_checkpoint_is_not_gone_on_from_the_other_way(hub, tmp_path, saved):
    folder, _ = hub("mimo")
    on_ranks(taught, folder, (*megatron(), *saved), 1, tmp_path)
    said = on_ranks(refusal, folder, (*megatron(), *(() if saved else ON)), tmp_path)
    expected = ("were trained", "has it off") if saved else ("were not trained", "has it on")
    assert all(words in said for words in expected)


# -- memory ------------------------------------------------------------------------------------------------------------


def held(folder: Path, options: tuple[str, ...]) -> tuple[int, int, int]:
    """On one rank: numbers of dense and expert parameters of prediction layers, and of their optimizer's state."""
    recipe = made.recipe(*options)
    trainer: Any = open_trainer(recipe, folder, total_steps=5)
    trainer.step(made.batch(recipe))
    named = [(n, p) for chunk in trainer._policy.bare for n, p in chunk.named_parameters()]
    ours = [(n, p.numel()) for n, p in named if n.startswith("mtp.")]
    state = [
        v for o in trainer._policy._optimizer.chained_optimizers for s in o.optimizer.state.values() for v in s.values()
    ]
    numbers = sum(s.numel() for s in state if torch.is_tensor(s))
    return sum(n for k, n in ours if ".experts." not in k), sum(n for k, n in ours if ".experts." in k), numbers


@pytest.mark.parametrize("case", ["mimo TP2", "mimo tied PP2", "deepseek_v3 SP", "qwen3_next PP2"])
def test_the_plan_counts_them_on_the_last_stage(hub, case):
    family, changes, layout = POLICIES[case]
    folder, _ = hub(family, **changes)
    options, spec = (*layout, *ON), spec_of(HfFolder(folder))
    on, off = (run_ranks(2, held, folder, o, join=False) for o in (options, layout))
    recipe = made.recipe(*options)
    divided = settings_of(recipe, spec, on_gpu=False).layout
    planned = prediction_parameters(spec, divided)
    for rank, (dense, expert, state) in enumerate(on):
        here = (planned.dense, planned.expert) if divided.pp == 1 or rank == 1 else (0, 0)
        assert (dense, expert) == here
        assert state - off[rank][2] == 2 * sum(here)


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_has_their_bytes(tied):
    spec = replace(get_spec("mimo-7b-rl"), tied=tied)
    options = megatron(PP2, "decoder_first_pipeline_num_layers=4", processes=2)
    on, off = (
        {v.name: v.value for v in megatron_bytes(made.recipe(*options, *o), spec, on_gpu=False)} for o in (ON, ())
    )
    more = spec.mtp_params
    assert {name: on[name] - off[name] for name in ("weights", "gradients", "optimizer")} == {
        "weights": 4 * more,
        "gradients": 4 * more,
        "optimizer": 8 * more,
    }
    assert on["activations, estimated"] > off["activations, estimated"]
    assert on.get("embedding") == (None if tied else 4 * spec.padded_vocab(128) * spec.hidden)


# -- beside other things -----------------------------------------------------------------------------------------------


def with_others(folder: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """A step with a teacher, a reference and a policy as published."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    before = {name: trainer.log_probs(batch, name).numpy().copy() for name in ("policy", "reference", "old_policy")}
    trainer.step(batch.replace(ref_log_probs=torch.from_numpy(before["reference"])))
    after = {name: trainer.log_probs(batch, name).numpy().copy() for name in ("reference", "old_policy")}
    return {"before": before, "after": after, "weights": weights_of(trainer)}


def test_frozen_models_have_no_prediction_layers(hub):
    folder, layers = hub("mimo")
    options = (*megatron(), *ON, "algo.kl_coef=0.1", "algo.old_log_probs=published")
    seen = on_ranks(with_others, folder, options)
    assert all(np.array_equal(seen["before"]["policy"], values) for values in seen["before"].values())
    assert all(np.array_equal(seen["before"]["policy"], values) for values in seen["after"].values())
    assert not any(np.array_equal(seen["weights"][name], initial(folder)[name]) for name in layers)


def taught_by(folder: Path, options: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs of the teacher, and the weights before any step."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    return trainer.log_probs(made.batch(recipe), "teacher").numpy().copy(), weights_of(trainer)


@pytest.mark.parametrize("teacher", ["alike", "other"])
def test_a_teacher_needs_no_prediction_layers(hub, tmp_path, teacher):
    folder, layers = hub("mimo")
    if teacher == "alike":
        other = tiny_model(tmp_path / "teacher", "mimo", seed=5)
    else:
        other = tiny_model(tmp_path / "teacher", "llama")
    options = (*megatron(), f"distill.teacher={other}")
    (seen, weights), (plain, _) = (on_ranks(taught_by, folder, (*options, *on)) for on in (ON, ()))
    assert np.array_equal(seen, plain)
    assert all(np.array_equal(weights[name], initial(folder)[name]) for name in layers)


def test_a_critic_has_none(hub, tmp_path):
    folder, layers = hub("mimo")
    plain = without_the_layer(tiny_model(tmp_path, "mimo"), load_file(folder / "model.safetensors"), layers)
    options = (*megatron(), *FREE, "algo.name=ppo")
    seen, expected = on_ranks(critic_of, folder, (*options, *ON)), on_ranks(critic_of, plain, options)
    assert seen == expected


def critic_of(folder: Path, options: tuple[str, ...]) -> tuple[float, int]:
    """(gradient norm, parameters) of the critic."""
    recipe = made.recipe(*options)
    trainer: Any = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(made.recipe())
    values = trainer.log_probs(batch, "critic")
    batch = batch.replace(values=values, returns=values + 1.0)
    norm = trainer.step(batch).metrics["critic_grad_norm"]
    return norm, sum(p.numel() for chunk in trainer._critic.bare for p in chunk.parameters())


def replayed(folder: Path, options: tuple[str, ...]) -> list[float]:
    """Whether two steps on a batch replayed the experts of its log-probs."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=10)
    batch = made.batch(recipe)
    trainer.log_probs(batch)
    return [trainer.step(batch).metrics["routing_replayed"] for _ in range(2)]


def test_experts_of_the_policy_are_replayed_and_those_of_the_layers_are_free(hub):
    folder, _ = hub("glm4_moe")
    options = (*megatron("moe_enable_routing_replay=true"), *ON)
    assert on_ranks(replayed, folder, options) == [1.0, 1.0]
