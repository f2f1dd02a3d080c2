"""Run functions on the ranks of a small Megatron world: forked processes, gloo, CPU.

megatron-core is imported once, in the pytest process (see __init__.py), and changed by nothing there; the ranks are
forks of it, so a case costs a few tenths of a second instead of one import per rank. What must be replaced to run
without a GPU is replaced in the ranks only.
"""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode


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
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _use_cpu()
    from tests.megatron import te_backend

    te_backend.install()
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


def _use_cpu() -> None:
    """Replace what megatron-core takes for granted on a GPU machine."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as async_writer
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # rotary embeddings, buffers and the expert bias are made on the current device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    # the embedding of the last pipeline stage is made on the GPU whatever the config says
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    # the checkpoint writer waits for copies from the GPU
    torch.cuda.synchronize = lambda *_: None
    # seeds of the "GPU" generator
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # named in the router although it exists only with Transformer Engine (0.16.1)
    moe_utils.te_general_gemm = None
    # a multiprocessing manager would be started per rank (6 s) to hand results of asynchronous saves over; ours are not
    async_writer._results_queue = queue.SimpleQueue()


class _OnCpu(TorchFunctionMode):
    """`device="cuda"` means the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def use_cpu_optimizer() -> None:
    """Further replacements, for Megatron's optimizers; for the rest of this rank's life."""
    _OnCpu().__enter__()
    real = torch.Tensor.type

    def kind(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        name = real(self, *arguments, **options)
        return f"torch.cuda.{name.rpartition('.')[2]}" if isinstance(name, str) else name

    # gradients and parameters are recognised by the names of GPU tensor types
    torch.Tensor.type = kind  # type: ignore[method-assign,assignment]
