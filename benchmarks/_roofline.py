"""What this machine can do, measured in the same run as the thing that is held against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks._common import timed
from benchmarks._models import Shape


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Best of several tries, on the device and dtype of the benchmark."""

    flops_per_s: float
    """dense matrix product"""
    bytes_per_s: float
    """read plus write of a copy that no cache holds"""

    def seconds(self, flops: float, moved: float) -> float:
        """The least time for an amount of arithmetic and of memory traffic that overlap perfectly."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)


def measure_limits(device: str, dtype: Any, *, smoke: bool = False) -> Limits:
    """Peak matrix-product rate over a few sizes, and copy bandwidth."""
    import torch

    big = device.startswith("cuda")
    sizes = [256] if smoke else ([4096, 8192] if big else [512, 1024, 2048])
    best = 0.0
    for size in sizes:
        a = torch.randn(size, size, device=device, dtype=dtype)
        b, out = torch.randn_like(a), torch.empty_like(a)
        repeats = max(1, (64 if big else 2) * 2048**3 // size**3)

        def multiply(a: Any = a, b: Any = b, out: Any = out, repeats: int = repeats) -> None:
            for _ in range(repeats):
                torch.mm(a, b, out=out)

        multiply()
        seconds = min(timed(multiply).wall for _ in range(3 if smoke else 5))
        best = max(best, 2 * size**3 * repeats / seconds)
    count = 2**20 if smoke else (2**30 if big else 2**26)
    source = torch.ones(count, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = min(timed(lambda: target.copy_(source)).wall for _ in range(5))
    return Limits(flops_per_s=best, bytes_per_s=2 * source.nbytes / seconds)


def matmul_seconds(shape: Shape, rows: int, device: str, dtype: Any) -> float:
    """Seconds for the weight products of one decode step on `rows` sequences, and nothing else: best of five.

    Every layer has its own matrices, so what a cache cannot hold is read from memory as in the real thing.
    """
    import torch

    weights = [torch.randn(o, i, device=device, dtype=dtype) * 0.02 for o, i in shape.matmul_shapes]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=device, dtype=dtype) for w in weights}

    def once() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    once()
    return min(timed(once).wall for _ in range(5))
