"""A trainer's memory on its device, given up while engines use that device, and taken back bit for bit.

Tensors keep their identity: what goes is the storage behind them. Views, flat buffers and whatever else shares a
storage find it again, so that nothing of a model, of FSDP2, of Megatron's gradient buffers or of an optimizer has to
know. On a CPU, memory that maps a file stays: it is not this process's to resize.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from slimecli.errors import SlimeError

P = ParamSpec("P")
R = TypeVar("R")
_ENTERED = ("slimecli.", "megatron.")
"""packages whose objects are looked into for tensors, besides all modules and optimizers"""


class Resting:
    """Moves the tensors that an object holds to host memory and back.

    Args:
        holder: a trainer; all that can be reached from it counts.
        device: only what lies there is moved.
    """

    def __init__(self, holder: object, device: torch.device) -> None:
        self._holder = holder
        self._device = device
        self._kept: list[tuple[Any, Tensor]] | None = None

    @property
    def is_away(self) -> bool:
        """Whether something of it is in host memory alone."""
        return self._kept is not None

    def leave(self) -> int:
        """Free the device's memory; returns the bytes freed. Idempotent."""
        if self._kept is not None:
            return 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kept = []
        try:
            for storage in self._storages():
                copy = _host_copy(storage)
                self._kept.append((storage, copy))
                storage.resize_(0)  # one after the other: the host needs room for no more than what is freed
        except BaseException:
            self.back()
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(copy.nbytes for _, copy in self._kept)

    def back(self) -> None:
        """Take the memory back, with what was in it. Idempotent; where it fails for want of memory, what is not back
        yet is still kept, and it can be called again."""
        while self._kept:
            storage, copy = self._kept[-1]
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
            self._kept.pop()
        self._kept = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> list[Any]:
        """What can be given up, each once."""
        found: dict[int, Any] = {}
        for tensor in held_tensors(self._holder):
            if tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    found[storage._cdata] = storage
        return list(found.values())


class OneAtATime:
    """Models in training that take turns on a device: one is there, with gradients and optimizer, the others' are in
    host memory. Without a member, nobody gives way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._members: dict[str, Resting] = {}

    def join(self, name: str, holder: object) -> None:
        """From now on all that can be reached from `holder` gives way to the others, and nothing else: members must
        have no tensor in common. Leaves the device to nobody, so that another model can be built there."""
        self._members[name] = Resting(holder, self._device)
        for member in self._members.values():
            member.leave()

    def take(self, name: str) -> None:
        """Have this one there; first the others leave. Idempotent."""
        for other, member in self._members.items():
            if other != name:
                member.leave()
        if self._members:
            self._members[name].back()


class DeviceHolder:
    """What trainers do about the device that their weights are on."""

    _resting: Resting
    """made by the trainer when everything is in its place"""

    def sleep(self) -> None:
        """Give up the device's memory, keeping everything in the host's. Until `wake`, calls that are marked `awake`
        are refused."""
        self._resting.leave()

    def wake(self) -> None:
        """Take it back. Without effect while awake."""
        self._resting.back()

    def close(self) -> None:
        """Let go of all weights. Idempotent."""
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


Trained = TypeVar("Trained", bound=DeviceHolder)


def awake(call: Callable[Concatenate[Trained, P], R]) -> Callable[Concatenate[Trained, P], R]:
    """Refuse a call on a trainer that sleeps, before anything is computed and on every rank alike."""

    @functools.wraps(call)
    def checked(self: Trained, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._resting.is_away:
            raise SlimeError(
                f"the trainer sleeps, its memory given up to engines: `{call.__name__}` needs it awake",
                "wake() it first; in a run, cluster.placement = 'disaggregated' shares no devices",
            )
        return call(self, *args, **kwargs)

    return checked


def _bytes_of(storage: Any) -> Tensor:
    """[bytes] uint8 over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: Any) -> Tensor:
    """[bytes] uint8 in host memory, pinned where a GPU will read it back."""
    live = _bytes_of(storage)
    copy = torch.empty(live.shape, dtype=torch.uint8, pin_memory=live.is_cuda)
    return copy.copy_(live)


def held_tensors(holder: object) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object through containers, modules, optimizers and our own objects."""
    seen: set[int] = set()
    waiting: list[Any] = [holder]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item.to_local() if hasattr(item, "to_local") else item
            if item.grad is not None:
                waiting.append(item.grad)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set)):
            waiting += item
        elif isinstance(item, (nn.Module, torch.optim.Optimizer)) or type(item).__module__.startswith(_ENTERED):
            waiting += getattr(item, "__dict__", {}).values()
