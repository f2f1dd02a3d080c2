"""What the loop asks of its parts. Structural: the embedded engine, an SGLang client, the FSDP and Megatron trainers,
Ray proxies and test fakes satisfy these without a base class. Six methods at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from slimecli.types import Group, Sample, StepStats, WeightReceipt

if TYPE_CHECKING:
    import torch

    from slimecli.batch import TrainBatch

ModelName = Literal["policy", "reference", "critic", "teacher", "old_policy"]
"""which of a trainer's models; old_policy: the policy as it was last published"""
SyncKind = Literal["in_process", "shared_memory", "tensor", "distributed", "disk", "disk_delta"]
Running = Literal["finish", "abort", "continue"]
"""what becomes of requests that run when new weights come"""


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """One weight update on its way to an engine. Exactly the fields of its kind are set."""

    kind: SyncKind
    version: int
    """step whose weights these are"""
    tensors: Mapping[str, torch.Tensor] | None = None
    """in_process: HF name -> tensor, read during the call only"""
    manifest: Path | None = None
    """shared_memory: JSON file naming the /dev/shm buffer and, per tensor, name, dtype, shape and byte offset"""
    buckets: Sequence[Mapping[str, Any]] | None = None
    """tensor: flat buffers in shared or device memory and the tensors in each (sync.buckets); JSON-ready"""
    folder: Path | None = None
    """disk: HF folder (safetensors); disk_delta: folder of a chain of versions (sync.chain)"""
    group: Mapping[str, Any] | None = None
    """distributed: names, dtypes, shapes and group_name as SGLang's update_weights_from_distributed takes them"""
    in_flight: bool = False
    """True: requests that run go on with the new weights, and say which token is of which version; False: an answer is
    of one version"""
    abort_running: bool = False
    """not in_flight: requests that run are ended with what they have, instead of being waited for"""

    @property
    def running(self) -> Running:
        """What becomes of requests that run."""
        return "continue" if self.in_flight else "abort" if self.abort_running else "finish"


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates answers. Payloads and replies are SGLang's, so that one client drives every engine."""

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """SGLang `/generate`: dict in; a reply dict, or a list of them for list input or n > 1.

        Raises SlimeError when the engine refuses the request or dies.
        """

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, flush, load, verify, continue; returns what the engine now holds."""

    async def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all; each still answers, with finish_reason abort and what it has so far."""

    async def sleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Free device memory by tag."""

    async def wake(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Take the memory back; weights must be pushed again before the next generate."""

    async def close(self) -> None:
        """Stop serving and free everything. Idempotent."""


@runtime_checkable
class StreamingEngine(Protocol):
    """A RolloutEngine that tells its answers while it says them."""

    async def generate_stream(self, payload: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        """Like generate, for a payload of lists; returns when all answers have ended.

        Args:
            tell: called with an answer's reply so far and its `index`; finish_reason is None until its end.
        """


@runtime_checkable
class Trainer(Protocol):
    """Holds policy, optimizer and (when asked for) reference weights. Every call is collective over its ranks.

    One that can share its device with engines has `sleep` and `wake` besides (slimecli.cluster.turns).
    """

    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> torch.Tensor:
        """[T] float32 log-prob of each trained target token at the rollout temperature, 0 elsewhere; no gradient.

        Of the critic, where the algorithm has one: its value before each of these tokens.
        """

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step on a batch that carries everything the loss needs."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, full tensor in the publish dtype) in a fixed order; one tensor alive at a time.

        Iterated to the end, they count as published: with algo.old_log_probs = "published" they are `old_policy` now.
        """

    def save(self, folder: Path) -> None:
        """Weights, optimizer and schedule position into an existing empty folder. The caller commits it."""

    def load(self, folder: Path) -> None:
        """Inverse of save, at any world size. Anything missing is an error."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class GenerateFn(Protocol):
    """Custom generate hook: one sample in, the finished sample (or several) out."""

    async def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]: ...


class RewardFn(Protocol):
    """Reward hook: a sample -> its score, or (with reward.group) a group -> its scores."""

    async def __call__(self, args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, float]: ...


class DynamicFilter(Protocol):
    """Decides whether a finished group is used for training."""

    def __call__(self, args: Any, samples: Group, **kwargs: Any) -> Any: ...
