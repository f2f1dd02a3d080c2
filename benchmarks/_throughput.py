"""What the two throughput benchmarks share: flags, device, and tokens per second out of timings."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _common
from benchmarks._common import Timing
from benchmarks._roofline import Limits, measure_limits
from slimecli import env

GPU_SHAPES = ("0.6b-gpu", "4b-gpu")


def parse(description: str, shapes: Iterable[str], repeats: int = 3, backend: Sequence[str] = ()) -> argparse.Namespace:
    """The flags of a throughput benchmark; `device` is resolved, and the threads are set.

    Args:
        backend: what `--backend` may be, the usual one first; empty: there is no such flag.
    """
    flags_of = _common.parser(description, repeats)
    flags_of.add_argument("--shape", action="append", choices=list(shapes), help="repeatable")
    flags_of.add_argument("--threads", type=int, default=1, help="CPU threads of both sides")
    flags_of.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    flags_of.add_argument("--models", type=Path, help="folder that keeps the random models between runs")
    if backend:
        flags_of.add_argument("--backend", choices=backend, default=backend[0], help="the trainer that is measured")
    flags = flags_of.parse_args()
    env.set_threads(flags.threads)
    env.quiet_libraries()
    import torch

    torch.set_num_threads(flags.threads)
    if flags.device == "auto":
        flags.device = "cuda" if torch.cuda.is_available() else "cpu"
    if flags.smoke:
        flags.repeats = 1
    return flags


Measure = Callable[[str, Any, Any, Limits, Path], dict[str, Any]]
"""(name, work, flags, limits, folder for models) -> result of one shape"""


def run(flags: Any, works: Mapping[str, Any], measure: Measure) -> tuple[list[dict[str, Any]], Limits]:
    """Every shape, and what the machine can do."""
    import torch

    dtype = torch.bfloat16 if flags.device == "cuda" else torch.float32
    limits = measure_limits(flags.device, dtype, smoke=flags.smoke)
    with tempfile.TemporaryDirectory() as scratch:
        where = flags.models or Path(scratch)
        return [measure(name, work, flags, limits, where) for name, work in works.items()], limits


def compare(timings: Mapping[str, Sequence[Timing]], tokens: int, other: str) -> dict[str, Any]:
    """Tokens per second of each side, and slime's medians over those of `other`."""
    sides = {}
    for name, measured in timings.items():
        middle = _common.medians(measured)
        sides[name] = {
            "tokens_per_s": tokens / middle.wall,
            "tokens_per_cpu_s": tokens / middle.cpu,
            "seconds": middle.wall,
            "spread": _common.spread([t.wall for t in measured]),
        }
    ours, theirs = sides["slime"], sides[other]
    return {
        "sides": sides,
        "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "ratio_cpu": ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"],
    }


def finish(name: str, flags: Any, against: str, results: list[dict[str, Any]], limits: Limits) -> None:
    """The whole result, under a name of its own on an accelerator."""
    summary = {
        "ratio": statistics.geometric_mean(r["ratio"] for r in results),
        "against": against,
        "threads": flags.threads,
        "gemm_gflops": limits.flops_per_s / 1e9,
        "stream_gb_per_s": limits.bytes_per_s / 1e9,
        "results": results,
    }
    _common.finish(f"{name}_gpu" if flags.device == "cuda" else name, summary, save=flags.save)
