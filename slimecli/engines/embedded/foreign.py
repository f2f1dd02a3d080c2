"""SGLang's own form of a bucket, for trainers that speak nothing else: a pickle that may name tensors and nothing more.

Whoever sends one chooses which shared memory this process opens, so an engine takes it only if it was started to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import resource_sharer
from typing import Any

import torch
from torch.multiprocessing import reductions

from slimecli.engines.embedded.config import DTYPES
from slimecli.engines.embedded.weights import WeightsRefused


@dataclass
class Metadata:
    """SGLang's FlattenedTensorMetadata."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _rebuild_cuda(*args: Any) -> torch.Tensor:
    """SGLang's variant: the device is named by its UUID."""
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if isinstance(args[6], str) and args[6] not in devices:
        raise WeightsRefused(f"the weights are on device {args[6]}, which this engine does not see", "use its devices")
    values = [*args]
    values[6] = devices.get(args[6], args[6])
    rebuilt: torch.Tensor = reductions.rebuild_cuda_tensor(*values)  # type: ignore[no-untyped-call]
    return rebuilt


_REDUCTIONS = (
    "rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "rebuild_storage_fd",
    "rebuild_storage_empty", "rebuild_cuda_tensor",
)  # fmt: skip
ADMITTED: Mapping[tuple[str, str], Callable[..., Any] | type | torch.dtype] = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "uint8"): torch.uint8,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.TypedStorage,
    ("multiprocessing.resource_sharer", "DupFd"): resource_sharer.DupFd,
    **{("torch.multiprocessing.reductions", name): getattr(reductions, name) for name in _REDUCTIONS},
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_cuda,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
}
"""all that such a pickle may name; none of it runs code of the sender's choosing"""


class _Opener(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise WeightsRefused(f"a bucket names {module}.{name}, which is not admitted", "send a flattened bucket")
        return ADMITTED[module, name]


def flattened_bucket(raw: bytes) -> dict[str, torch.Tensor]:
    """Name -> tensor, views into the sender's memory."""
    try:
        data = _Opener(io.BytesIO(raw)).load()
        flat, metadata = data["flattened_tensor"], data["metadata"]
        return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in metadata}
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise WeightsRefused(f"not a flattened bucket: {error}", "send what SGLang's own engine would take") from None
