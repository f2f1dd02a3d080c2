"""A checkpoint continues at any other layout, and is a torch_dist checkpoint that `slime convert` reads."""

from __future__ import annotations

import logging
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from slimecli.errors import SlimeError
from slimecli.trainers import open_trainer
from slimecli.weights.convert import torch_dist_to_hf
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, weights_of, world_of
from tests.trainers.processes import run_ranks

ALGO = ("algo.kl_coef=0.1", "trainer.lr_schedule=linear", "trainer.weight_decay=0.1")
TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
SP, ETP1 = "sequence_parallel=true", "expert_tensor_parallel_size=1"
LAYOUTS = {
    "one": megatron(),
    "TP2": megatron(TP2, SP, processes=2),
    "TP2 EP2": megatron(TP2, SP, EP2, ETP1, processes=2),
    "PP2": megatron(PP2, processes=2),
    "VPP2": megatron(PP2, VPP2, processes=2),
    "DP2": megatron(processes=2),
    "EP2": megatron(EP2, processes=2),
    "CP2": megatron(CP2, processes=2),
    "no distributed optimizer": megatron("use_distributed_optimizer=false", processes=2),
}


def two_steps_and_one(folder: Path, out: Path, options: tuple[str, ...]) -> tuple[Any, dict[str, np.ndarray]]:
    """Save after two steps and make a third; returns its statistics, and the weights that were saved."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    for seed in range(2):
        step(trainer, recipe, seed)
    out.mkdir(exist_ok=True)
    trainer.save(out)
    saved = weights_of(trainer)
    return step(trainer, recipe, 2), saved


def continued(folder: Path, out: Path, options: tuple[str, ...]) -> tuple[Any, dict[str, np.ndarray]]:
    """The third step of a trainer that has loaded, and the weights it loaded."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    trainer.load(out)
    loaded = weights_of(trainer)
    return step(trainer, recipe, 2), loaded


def step(trainer: Any, recipe: Any, seed: int) -> tuple[float, float, float, np.ndarray]:
    """Loss, gradient norm, learning rate, and log-probs after the step."""
    batch = made.batch(recipe, seed=seed)
    batch = batch.replace(ref_log_probs=trainer.log_probs(batch, "reference"))
    stats = trainer.step(batch)
    return stats.loss, stats.grad_norm, stats.lr, trainer.log_probs(batch).numpy().copy()


def run(work: Any, folder: Path, out: Path, layout: str) -> Any:
    options = (*ALGO, *LAYOUTS[layout])
    return run_ranks(world_of(options), work, folder, out, options, join=False)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model_of):
    """(family, layout) -> model, checkpoint, what came after, weights in it."""
    found: dict[Any, Any] = {}

    def make(family: str, layout: str) -> Any:
        if (family, layout) not in found:
            folder, out = model_of(family, 3 if family == "deepseek_v3" else 4), tmp_path_factory.mktemp("checkpoint")
            found[family, layout] = (folder, out, *run(two_steps_and_one, folder, out, layout))
        return found[family, layout]

    return make


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("qwen3", "one", "one"),
        ("qwen3", "TP2", "PP2"),
        ("qwen3", "TP2", "one"),
        ("qwen3", "TP2", "VPP2"),
        ("qwen3", "VPP2", "DP2"),
        ("qwen3", "DP2", "TP2"),
        ("qwen3", "CP2", "TP2"),
        ("qwen3", "no distributed optimizer", "no distributed optimizer"),
        ("qwen3_moe", "EP2", "one"),
        ("qwen3_moe", "EP2", "TP2 EP2"),
        ("qwen3_moe", "one", "PP2"),
        ("deepseek_v3", "TP2 EP2", "EP2"),
        ("minimax_m2", "TP2", "one"),
        ("mixtral", "TP2 EP2", "PP2"),
        ("qwen2_moe", "EP2", "TP2 EP2"),
        ("glm4", "TP2", "DP2"),
    ],
)
def test_a_run_continues_at_another_layout(saved, family, first, second):
    folder, out, expected, weights = saved(family, first)
    found, loaded = run(continued, folder, out, second)
    assert weights.keys() == loaded.keys()
    assert all(np.array_equal(weights[name], loaded[name]) for name in weights)
    assert found[:2] == pytest.approx(expected[:2], rel=0 if first == second else 1e-5, abs=1e-7)
    assert found[2] == expected[2] == pytest.approx(made.recipe().trainer.lr * 2 / 5)
    assert np.abs(found[3] - expected[3]).max() <= (0 if first == second else 2e-5)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "TP2"),
        ("qwen3_moe", "EP2"),
        ("deepseek_v3", "TP2 EP2"),
        ("minimax_m2", "TP2"),
        ("mixtral", "TP2 EP2"),
        ("qwen2_moe", "EP2"),
        ("qwen3_next", "EP2"),
        ("qwen3_5", "TP2"),
    ],
)
def test_it_converts_to_exactly_the_weights(saved, tmp_path, family, layout):
    _, out, _, weights = saved(family, layout)
    torch_dist_to_hf(out, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name].numpy(), weights[name]) for name in weights)


def test_the_same_state_makes_the_same_files(saved, tmp_path):
    folder, first, _, _ = saved("qwen3", "TP2")
    run(two_steps_and_one, folder, tmp_path, "TP2")
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert Path("iter_0000002/.metadata") in names
    for name in names:
        if name.suffix == ".distcp" or name.parts[0] == "hf":
            assert (first / name).read_bytes() == (tmp_path / name).read_bytes(), name


def saved_at_once(folder: Path, out: Path, options: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Save before the first step."""
    trainer = open_trainer(made.recipe(*options), folder, total_steps=5)
    trainer.save(out)
    return weights_of(trainer)


def test_a_checkpoint_of_no_step(model_of, tmp_path):
    folder = model_of("qwen3_moe", 4)
    weights = run(saved_at_once, folder, tmp_path, "EP2")
    found, loaded = run(continued, folder, tmp_path, "TP2 EP2")
    assert all(np.array_equal(weights[name], loaded[name]) for name in weights)
    assert found[2] == pytest.approx(made.recipe().trainer.lr * 4 / 5)


def warned(folder: Path, out: Path, options: tuple[str, ...]) -> list[str]:
    """What megatron-core logs of a checkpoint."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.dist_checkpointing").addHandler(handler)
    open_trainer(made.recipe(*options), folder, total_steps=5).save(out)
    return said


@pytest.mark.parametrize("layout", ["TP2", "DP2"])
def test_nothing_is_warned_of(model_of, tmp_path, layout):
    """That ranks' states differ would look like damage."""
    assert run_ranks(2, warned, model_of("qwen3", 4), tmp_path, LAYOUTS[layout], join=False) == [[], []]


class OnToGpu(TorchFunctionMode):
    """How large tensors are that are put on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def gathered(folder: Path, out: Path, options: tuple[str, ...]) -> int:
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    step(trainer, recipe, 0)
    with OnToGpu() as watch:
        trainer.save(out)
    return max(watch.sizes)


def test_the_optimizers_state_is_put_together_in_host_memory(model_of, tmp_path):
    """A GPU that has room for a step has not for a copy of all float32 weights besides."""
    for largest in run_ranks(2, gathered, model_of("qwen3", 4), tmp_path, (*ALGO, *LAYOUTS["DP2"]), join=False):
        assert largest < 100


def cut_short(folder: Path, out: Path, options: tuple[str, ...], room: int) -> tuple[str, float]:
    """What is said of a checkpoint of which no file has more room, and the loss of the step after it."""
    recipe = made.recipe(*options)
    trainer = open_trainer(recipe, folder, total_steps=5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    with pytest.raises(SlimeError) as caught:
        trainer.save(out)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value), step(trainer, recipe, 0)[0]


@pytest.mark.parametrize(("room", "told"), [(0, "cut short"), (20_000, "`ulimit -f` "), (100_000, "cut short")])
def test_a_full_disk_is_told_and_training_could_go_on(model_of, tmp_path, room, told):
    options = (*ALGO, *LAYOUTS["one"])
    [(said, loss)] = run_ranks(1, cut_short, model_of("qwen3", 4), tmp_path, options, room, join=False)
    assert told in said and "iter_0000000" in said and "unexpected pos" not in said, said
    assert np.isfinite(loss)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def evil(path: Path) -> None:
    import os

    torch.save({"iteration": Evil(os.system, ("exit 1",))}, path)


class Evil:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("latest_checkpointed_iteration.txt", Path.unlink, "latest_checkpointed_iteration.txt"),
        ("iter_0000002/.metadata", Path.unlink, ".metadata"),
        ("iter_0000002/__1_0.distcp", Path.unlink, "__1_0.distcp"),
        ("iter_0000002/__1_0.distcp", truncated, "__1_0.distcp"),
        ("iter_0000002/common.pt", Path.unlink, "common.pt"),
        ("iter_0000002/common.pt", truncated, "common.pt"),
        ("iter_0000002/common.pt", evil, "common.pt"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_what_is_missing_or_damaged_is_named(saved, tmp_path, file, harm, said):
    folder, out, _, _ = saved("qwen3", "TP2")
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    harm(tmp_path / file)
    with pytest.raises(AssertionError) as caught:
        run(continued, folder, tmp_path, "one")
    assert "DataError" in str(caught.value)
    assert said in str(caught.value).rpartition("DataError")[2]


def test_a_checkpoint_of_another_model_is_refused(saved, model_of):
    _, out, _, _ = saved("qwen3", "TP2")
    with pytest.raises(AssertionError, match="DataError: .* does not fit this model: it has no 'output_layer.weight'"):
        run(continued, model_of("llama", 4), out, "one")


def test_a_checkpoint_of_the_other_optimizer_is_refused_in_few_words(saved):
    folder, out, _, _ = saved("qwen3", "no distributed optimizer")
    with pytest.raises(AssertionError) as caught:
        run(continued, folder, out, "one")
    said = str(caught.value).rpartition("DataError: ")[2]
    assert "it has no 'optimizer.state.param.decoder.final_layernorm.weight'" in said
    assert "its use_distributed_optimizer of [megatron]" in said and len(said) < 500
