"""The machine a plan is made for, read without torch; and its arithmetic speed, measured in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slimecli.errors import SlimeError
from slimecli.files import existing_parent
from slimecli.recipe import Recipe

_MEASURE = """
import json, sys, time, torch
torch.set_num_threads(1)
hidden = int(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
rates = {}
for name, rows in (("train", 1024), ("decode", int(sys.argv[2]))):
    x, w = (torch.randn(n, hidden, device=device, dtype=dtype) for n in (rows, 4 * hidden))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(8):
            y = x @ w.T
        y.float().sum().item()
        best = min(best, (time.perf_counter() - start) / 8)
    rates[name] = 2 * rows * hidden * 4 * hidden / best
print(json.dumps({"device": device, **rates}))
"""
"""runs in a child, so that the planning process stays free of torch"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is there."""

    cpus: int
    """processors this process may use"""
    memory_bytes: int
    """memory the operating system could hand out now"""
    gpus: int
    """NVIDIA devices"""
    gpu_memory_bytes: int
    """memory of the smallest of them; 0 without one"""
    disk_free_bytes: int
    """free space where the run directory will be"""
    shared_memory_bytes: int
    """free space of /dev/shm; 0 where there is none"""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Matrix-multiply rates of one process (FLOP/s)."""

    device: str
    train: float
    """with 1024 rows, as a training micro-batch has"""
    decode: float
    """with one row per answer in flight"""


def this_machine(folder: Path) -> Machine:
    """The machine this process runs on; `folder` says which disk counts."""
    gpus = gpu_memories()
    shm = Path("/dev/shm")
    return Machine(
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_available_memory(),
        gpus=len(gpus),
        gpu_memory_bytes=min(gpus, default=0),
        disk_free_bytes=shutil.disk_usage(existing_parent(folder.absolute())).free,
        shared_memory_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
    )


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    # a container may be allowed less than the machine has
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(free, int(text)) if text.isdigit() else free


def runs_on_gpus(recipe: Recipe, gpus: int) -> bool:
    """Whether the run has GPUs: this machine's, or those that a cluster which is joined is taken to have."""
    return gpus > 0 or bool(recipe.cluster.address)


def gpu_memories() -> list[int]:
    """Bytes per NVIDIA device; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return [int(x) * 2**20 for x in done.stdout.split() if x.isdigit()] if done.returncode == 0 else []


def measure(hidden: int, rows: int) -> Speed:
    """Measure this machine's matrix-multiply rates at the model's width (a few seconds).

    Args:
        hidden: width of the model; capped, since beyond 2048 the rate no longer changes.
        rows: answers decoded together.
    """
    arguments = [sys.executable, "-c", _MEASURE, str(min(hidden, 2048)), str(rows)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SlimeError(f"the measurement failed: {done.stderr.strip()[-300:]}", "plan without --measure")
    result = json.loads(done.stdout)
    return Speed(device=result["device"], train=result["train"], decode=result["decode"])
