"""Processes, devices and collectives of the FSDP trainer. With one process every function here is (nearly) nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli import env
from slimecli.errors import SlimeError
from slimecli.trainers._model import layers

Placed = TypeVar("Placed", bound=torch.nn.Module)


def join(processes: int) -> tuple[torch.device, int, int]:
    """(device, rank, world size); enters the process group that the environment describes, unless already in one."""
    rank, world = env.distributed_rank()
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    elif world > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if world != processes:
        raise SlimeError(
            f"the trainer runs in {world} process(es), the recipe says {processes}",
            f"start it in {processes} processes (torchrun, or slime run on Ray), or --set trainer.processes={world}",
        )
    if not torch.cuda.is_available():
        return torch.device("cpu"), rank, world
    device = torch.device("cuda", env.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device, rank, world


def place(model: Placed, device: torch.device, world: int, compute_dtype: torch.dtype) -> Placed:
    """The model on its device: sharded over the ranks layer by layer, computing in `compute_dtype` on a GPU."""
    if device.type == "cpu" and world == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        from torch._C._distributed_c10d import HashStore

        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    dtype = compute_dtype if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (world,))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses carry global denominators: gradients of the ranks are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model.to(device)


def reshard(model: torch.nn.Module) -> None:
    """Have no rank keep whole weights that a forward pass has gathered: the next one gathers them anew."""
    for module in model.modules():
        release = getattr(module, "reshard", None)
        if release is not None:
            release()


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, or the plain one; live memory."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers inside follow from `seed`; those outside are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank. Collective for a sharded one."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def add_up(tensor: Tensor, world: int) -> None:
    """Sum over ranks, in place."""
    if world > 1:
        dist.all_reduce(tensor)


def reduce_metrics(sums: dict[str, Tensor], largest: dict[str, Tensor], world: int) -> dict[str, float]:
    """Sums and maxima over all ranks, as numbers; one collective each."""
    result: dict[str, float] = {}
    for values, operation in ((sums, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
        if not values:
            continue
        stacked = torch.stack([v.double() for v in values.values()])
        if world > 1:
            dist.all_reduce(stacked, op=operation)
        result |= dict(zip(values, stacked.tolist(), strict=True))
    return result
