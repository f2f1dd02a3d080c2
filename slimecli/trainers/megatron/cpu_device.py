"""What megatron-core takes for granted about CUDA, answered on a machine without a GPU.

Each answer names where megatron-core 0.16 asks and what would make it unnecessary. `install` is called in trainer
processes only, never where there is a GPU, and once.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from slimecli.errors import SlimeError

CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Install all answers. Idempotent; refuses where there is a GPU."""
    if torch.cuda.is_available():
        raise SlimeError("the CPU device of the Megatron backend was asked for on a machine with a GPU", "report this")
    if _installed:
        return
    for answer in ANSWERS:
        answer()


def _current_device() -> None:
    """`torch.cuda.current_device()` as the device of new tensors (rotary embeddings, gradient buffers, pipeline
    receives). Goes when megatron-core asks `get_current_device`."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` literals, `Tensor.cuda()`, pinned memory (schedules, optimizer, clip_grads, rope with context
    parallelism). Goes when megatron-core has no device literals."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _device_literals() -> None:
    mode = _CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _installed.append(mode)


def _random_state() -> None:
    """The tracker of CUDA random states (seeding, recomputation) uses the CPU generator. Goes when the tracker takes a
    device."""
    import megatron.core.tensor_parallel.random as tracker

    def get(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    tracker._get_cuda_rng_state = get
    tracker._set_cuda_rng_state = put
    torch.cuda.get_rng_state = get
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]


def _tensor_type() -> None:
    """`param.type() == "torch.cuda.FloatTensor"` in the optimizers and clip_grads. Goes when they ask for dtypes."""
    original = torch.Tensor.type

    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        asked_by_megatron = str(sys._getframe(1).f_globals.get("__name__")).startswith("megatron.core.")
        if args or kwargs or not isinstance(found, str) or ".cuda." in found or not asked_by_megatron:
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = answer  # type: ignore[method-assign,assignment]


def _synchronize() -> None:
    """`torch.cuda.synchronize()` (pipeline communication, checkpoints): nothing runs behind a CPU's back. Goes when
    megatron-core guards it."""
    torch.cuda.synchronize = lambda *_, **__: None


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _streams() -> None:
    """Streams and events of the all-to-all dispatcher. Goes when megatron-core takes torch.accelerator's."""
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def _experts() -> None:
    """The dispatcher copies split sizes to the host only if they are CUDA tensors, yet wants them as numpy. Goes with a
    guard upstream."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host


def _compiled_functions() -> None:
    """Small functions (routers' counts, output gates) are compiled for a GPU; on a CPU that takes a C++ compiler and
    half a minute, and gains nothing. Goes when megatron-core asks where it is."""
    torch.compiler.set_stance("force_eager")


def _uneven_collectives() -> None:
    """all_gather and reduce_scatter of parts that differ in size (expert tensor parallelism), which NCCL takes. Goes
    when gloo takes them."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({p.shape for p in parts}) == 1:
            return gather(parts, own, group=group, async_op=async_op)
        parts[dist.get_rank(group)].copy_(own)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    def reduce_scatter(
        own: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({p.shape for p in parts}) == 1:
            return scatter(own, parts, op=op, group=group, **kwargs)
        joined = torch.cat(parts)
        dist.all_reduce(joined, op=op, group=group)
        first = sum(len(p) for p in parts[: dist.get_rank(group)])
        own.copy_(joined[first : first + len(own)])
        return None

    dist.all_gather = all_gather  # type: ignore[assignment]
    dist.reduce_scatter = reduce_scatter  # type: ignore[assignment]


ANSWERS = (
    _current_device,
    _random_state,
    _tensor_type,
    _synchronize,
    _streams,
    _experts,
    _compiled_functions,
    _uneven_collectives,
    _device_literals,
)
"""in the order of installing: the function mode comes last, so that it does not see the others being installed"""
