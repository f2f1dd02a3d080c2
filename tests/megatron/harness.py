"""Run functions on the ranks of a small Megatron world: forked processes, gloo, CPU.

megatron-core is imported once, in the pytest process (see __init__.py), and changed by nothing there; the ranks are
forks of it, so a case costs a few tenths of a second instead of one import per rank. What must be replaced to run
without a GPU is replaced in the ranks only.
"""

from __future__ import annotations

import gc
import os
import queue
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async as async_writer


@dataclass(frozen=True)
class World:
    """How the ranks share a model."""

    tp: int = 1
    """tensor parallel"""
    pp: int = 1
    """pipeline parallel"""
    ep: int = 1
    """expert parallel"""
    etp: int = 1
    """tensor parallel inside an expert"""
    ranks: int = 0
    """processes; 0: as many as tensor and pipeline parallelism take"""

    @property
    def size(self) -> int:
        return self.ranks or self.tp * self.pp

    def __str__(self) -> str:
        parts = [f"{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if n > 1]
        return "-".join(parts + (["etp2"] if self.etp > 1 else [])) or "tp1"


def run(world: World, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(world, *arguments)` on every rank; an exception of any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, args=(world, f"{folder}/store", function, arguments), nprocs=world.size, start_method="fork"
        )
    assert not torch.distributed.is_initialized(), "the pytest process took part"


def _rank(rank: int, world: World, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # megatron-core collects often: it need not look at what the parent imported
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from slimecli.trainers.megatron import cpu_device, stand_ins

    cpu_device.install()
    stand_ins.install()
    # a multiprocessing manager would be started per rank (6 s) to hand results of asynchronous saves over; ours are not
    async_writer._results_queue = queue.SimpleQueue()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, world.size), rank=rank, world_size=world.size
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
    )
    function(world, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
