"""What stands in for a GPU: only where there is none, and only for what megatron-core really has."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from slimecli.errors import SlimeError
from slimecli.trainers.megatron import cpu_device
from tests.trainers.processes import run_ranks

TORCH = (
    "cuda.current_device",
    "cuda.get_rng_state",
    "cuda.manual_seed",
    "cuda.synchronize",
    "cuda.Stream",
    "cuda.Event",
    "cuda.current_stream",
    "cuda.default_stream",
    "cuda.stream",
    "Tensor.type",
    "Tensor.record_stream",
    "distributed.all_gather",
    "distributed.reduce_scatter",
)
CORE = (
    "tensor_parallel.random:_get_cuda_rng_state",
    "tensor_parallel.random:_set_cuda_rng_state",
    "transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    "dist_checkpointing.strategies.filesystem_async:_results_queue",
    "models.gpt.gpt_layer_specs:TENorm",
    "models.gpt.gpt_layer_specs:TESpecProvider",
    "models.gpt.moe_module_specs:TESpecProvider",
    "models.gpt.experimental_attention_variant_module_specs:TESpecProvider",
    "transformer.transformer_block:TENorm",
    "transformer.multi_latent_attention:TELinear",
    "optimizer:Adam",
    "optimizer:USING_PYTORCH_OPTIMIZER",
    "optimizer.distrib_optimizer:Adam",
    "optimizer.distrib_optimizer:HAVE_APEX_OR_TE",
    "optimizer.distrib_optimizer:USING_APEX_OPTIMIZER",
)


def found(path):
    owner = torch
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


@pytest.mark.parametrize("name", CORE)
def test_megatron_core_has_what_is_replaced(name):
    """Some names are bound only where Transformer Engine is installed; what uses them is there in any case."""
    path, _, attribute = name.partition(":")
    module = import_module(f"megatron.core.{path}")
    assert hasattr(module, attribute) or re.search(rf"\b{attribute}\(|= {attribute}\b", inspect.getsource(module))


def test_nothing_is_replaced_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = [found(path) for path in TORCH]
    with pytest.raises(SlimeError, match="machine with a GPU"):
        cpu_device.install()
    assert [found(path) for path in TORCH] == before


def test_this_process_is_as_it_was():
    """Trainers of these tests live in forked ranks."""
    assert not cpu_device._installed
    assert all("slimecli" not in getattr(found(path), "__module__", "") for path in TORCH)
    assert found("Tensor.type").__name__ == "type"


def replaced():
    before = {path: found(path) for path in TORCH}
    cpu_device.install()
    cpu_device.install()
    assert len(cpu_device._installed) == 1
    unchanged = [path for path, was in before.items() if found(path) is was]
    literal = torch.zeros(2, device="cuda", pin_memory=True)
    moved = [literal.cuda(), literal.to("cuda:0"), literal.pin_memory(), torch.empty(1, device=torch.device("cuda", 0))]
    assert torch.zeros(1).type() == "torch.FloatTensor", "only megatron-core is told of CUDA types"
    return unchanged, {t.device.type for t in (literal, *moved)}, torch.cuda.is_available()


def test_every_replacement_is_made_once():
    [(unchanged, devices, available)] = run_ranks(1, replaced, join=False)
    assert unchanged == []
    assert devices == {"cpu"}
    assert not available


def compiled():
    """As megatron-core decorates its functions."""

    def backend(graph, inputs):
        raise AssertionError("there may be no C++ compiler")

    function = torch.compile(lambda x: x + 1, backend=backend)
    cpu_device.install()
    return function(torch.zeros(2)).tolist()


def test_nothing_is_compiled():
    assert run_ranks(1, compiled, join=False) == [[1.0, 1.0]]


def uneven(rank_rows):
    """all_gather and reduce_scatter of parts of several sizes, and of one."""
    cpu_device.install()
    rank = dist.get_rank()
    answers = []
    for rows in (rank_rows, [2] * len(rank_rows)):
        own = torch.full((rows[rank], 2), float(rank + 1))
        parts = [torch.empty(n, 2) for n in rows]
        dist.all_gather(parts, own)
        mine = torch.empty(rows[rank], 2)
        dist.reduce_scatter(mine, [p * (rank + 1) for p in parts])
        answers.append((torch.cat(parts).tolist(), mine.tolist()))
    return answers


def test_uneven_collectives():
    for rank, answers in enumerate(run_ranks(2, uneven, [1, 3])):
        for rows, (gathered, scattered) in zip(([1, 3], [2, 2]), answers, strict=True):
            assert gathered == [[1.0, 1.0]] * rows[0] + [[2.0, 2.0]] * rows[1]
            assert scattered == [[3.0 * (rank + 1)] * 2] * rows[rank]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_answer_is_installed_on_cuda(tmp_path):
    """A trainer on a GPU leaves torch as it is."""
    from slimecli.trainers import open_trainer
    from tests.models import tiny_model
    from tests.trainers import made
    from tests.trainers.megatron.ranks import megatron

    before = [found(path) for path in TORCH]
    recipe = made.recipe(*megatron(), "model.dtype=bfloat16")
    # flash kernels want heads of at least 32
    trainer = open_trainer(recipe, tiny_model(tmp_path, hidden_size=128, head_dim=32), total_steps=2)
    assert trainer.step(made.batch(recipe)).grad_norm > 0
    trainer.close()
    assert [found(path) for path in TORCH] == before
    assert "slimecli.trainers.megatron.cpu_device" not in sys.modules or not cpu_device._installed
