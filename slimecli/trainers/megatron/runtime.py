"""The process-wide side of megatron-core: device, process groups, random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from slimecli.errors import SlimeError
from slimecli.trainers import _parallel
from slimecli.trainers.megatron import optimizer
from slimecli.trainers.megatron.arguments import Settings


def start(settings: Settings, processes: int, seed: int) -> tuple[torch.device, int, int]:
    """(device, rank, world size); enters the process group and makes megatron-core's groups of it.

    A trainer that is opened after another in the same processes makes the groups anew: its layout may be another one.
    """
    device, rank, world = _parallel.join(processes)
    if device.type == "cpu":
        import slimecli.trainers.megatron.cpu_device as cpu_device

        cpu_device.install()
    if not dist.is_initialized():
        from torch._C._distributed_c10d import HashStore

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout = settings.layout
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order="tp-cp-ep-dp-pp",
    )
    model_parallel_cuda_manual_seed(seed % 2**31)
    return device, rank, world


def in_precision(chunks: list[Any]) -> list[Any]:
    """The chunks, in bf16 with casts at the model's ends; buffers stay as they are: what corrects a router's choice of
    experts is float32 in every model's folder."""
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    if not config.bf16:
        return chunks
    kept = [(m, n, b) for c in chunks for m in c.modules() for n, b in m.named_buffers(recurse=False)]
    wrapped = [Float16Module(config, c) for c in chunks]
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return wrapped


def wrap(chunks: list[Any], settings: Settings) -> list[Any]:
    """The chunks with gradient buffers (megatron-core's DDP) and, in bf16, casts at the model's ends."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    inner = in_precision(chunks)
    ddp = DistributedDataParallelConfig(**settings.ddp)
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=ddp, module=c, disable_bucketing=i > 0)
        for i, c in enumerate(inner)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if settings.ddp.get("overlap_grad_reduce") and len(wrapped) > 1:
        config.grad_sync_func = [w.start_grad_sync for w in wrapped]
    if settings.ddp.get("overlap_param_gather"):
        gather = [w.start_param_sync for w in wrapped]
        config.param_sync_func = gather if len(gather) > 1 else gather[0]
    for w in wrapped:
        w.broadcast_params()
    return wrapped


def make_optimizer(chunks: list[Any], settings: Settings) -> Any:
    """Megatron's optimizer; weight decay on matrices only, as megatron-core has it by default."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    made = get_megatron_optimizer(OptimizerConfig(**settings.optimizer), chunks)
    for part in optimizer.parts(made):
        optimizer.mend_offloaded(part)
    return made


def schedule(made: Any, lr: float, weight_decay: float) -> None:
    """What Megatron-LM's scheduler sets before a step: megatron-core groups parameters and leaves the decay to it."""
    for group in made.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]


@contextlib.contextmanager
def evaluating(chunks: list[Any]) -> Iterator[None]:
    """Modules in evaluation mode inside."""
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()


def gather_parameters(chunks: list[Any]) -> None:
    """Collect what the distributed optimizer has changed from the ranks that changed it."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def zero_gradients(chunks: list[Any], made: Any) -> None:
    """Before the first micro-batch of a step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    made.zero_grad()


def check_gradients(chunks: list[Any], step: int) -> None:
    """Raise on every rank, before the weights are touched, if any rank has a NaN or infinite gradient."""
    bad = next((n for c in chunks for n, p in c.named_parameters() if not _finite(p)), "")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, bad)
    first = next((n for n in told if n), "")
    if first:
        name = first.replace("module.", "")
        raise SlimeError(
            f"optimizer step {step}: the gradient of {name} is NaN or infinite; the weights are as before the step",
            "resume from the last checkpoint with a lower trainer.lr, and look at the step's samples",
        )


def _finite(parameter: Any) -> bool:
    grad = getattr(parameter, "main_grad", None)
    return grad is None or bool(torch.isfinite(grad.sum()))
