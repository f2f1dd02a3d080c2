"""Converting a checkpoint both ways, against a plain copy of its files and against instantiating the model.

    python -m benchmarks.convert [--gb 4] [--repeats 3] [--folder DIR] [--megatron-python VENV/bin/python]

Each program that is measured has a process of its own, and has flushed what it wrote to the disk when its clock stops.
The source is in the page cache for all alike. The plain copy writes through that cache, as copies do; slime writes past
it, and verifies from the disk. `direct copy` is a copy that writes as slime does: what the disk can take. `seconds` is
the work without starting Python and importing torch; `whole` includes that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import _common
from slimecli import env, files

MODEL = "qwen3-4b"
"""its layers, as many as fill the bytes asked for"""
SIDES = ("copy", "direct copy", "to torch_dist, unverified", "to torch_dist", "to hf, unverified", "to hf")


def generate(folder: Path, nbytes: float, *, tiny: bool) -> int:
    """A random HF folder; returns the bytes of its weights."""
    import torch

    from slimecli.model_specs import get_spec
    from slimecli.weights.hf import save_hf_folder
    from slimecli.weights.maps import hf_shapes

    spec = get_spec(MODEL)
    if tiny:
        spec = dataclasses.replace(spec, layers=1, hidden=64, ffn=192, heads=4, kv_heads=2, head_dim=16, vocab=512)
    else:
        one, two = (dataclasses.replace(spec, layers=n).weight_bytes() for n in (1, 2))
        spec = dataclasses.replace(spec, layers=max(1, math.ceil((nbytes - one) / (two - one)) + 1))
    block = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(hf_shapes(spec).items()):
            count, start = math.prod(shape), number * 7919 % 4096
            yield name, torch.cat([block] * -(-(count + start) // len(block)))[start : start + count].view(shape)

    notes = save_hf_folder(weights(), folder, like=folder)
    files.write_json(folder / "config.json", spec.to_config())
    flush(folder)
    return int(notes["bytes"])


def flush(folder: Path) -> None:
    """Flush every file of a folder to the disk."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def warm(folder: Path) -> None:
    """Have every file of a folder in the page cache; what slime writes passes that by."""
    room = bytearray(1 << 24)
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(room):
                pass


def copy(source: Path, out: Path) -> None:
    """The yardstick."""
    out.mkdir()
    for path in (p for p in source.rglob("*") if p.is_file()):
        shutil.copyfile(path, out / path.name)
    flush(out)


def direct_copy(source: Path, out: Path) -> None:
    """The same, past the page cache."""
    from slimecli.weights.direct import DiskFile, aligned

    out.mkdir()
    room = aligned(1 << 24)
    for path in (p for p in source.rglob("*") if p.is_file()):
        size = path.stat().st_size
        target = DiskFile(out / path.name, size)
        with path.open("rb", buffering=0) as handle:
            for offset in range(0, size, len(room)):
                target.write(offset, room[: handle.readinto(room)])
        target.flush()
        target.close()


COPIES = {"copy": copy, "direct copy": direct_copy}


def child(side: str, source: Path, out: Path) -> None:
    """Body of a measured process: one JSON line on stdout."""
    if side in COPIES:
        begin = time.perf_counter()
        COPIES[side](source, out)
    else:
        from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf

        convert = torch_dist_to_hf if side.startswith("to hf") else hf_to_torch_dist
        begin = time.perf_counter()
        convert(source, out, verify="unverified" not in side)
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - begin, "peak_bytes": peak_bytes()}) + "\n")


def measure(command: list[str]) -> dict[str, float]:
    """Run a process that ends with {"seconds", "peak_bytes"}; adds the time of the whole and its CPU seconds."""
    os.sync()
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(
        command,
        cwd=_common.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=env.child_env(PYTHONPATH=str(_common.ROOT)),
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "whole": time.perf_counter() - begin, "cpu_seconds": cpu}


def run_side(side: str, hf: Path, megatron: Path, scratch: Path) -> dict[str, float]:
    """One measurement; what it wrote is removed, but for the first Megatron checkpoint, the source of the way back."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    source = megatron if side.startswith("to hf") else hf
    warm(source)
    found = measure([sys.executable, "-m", "benchmarks.convert", "--child", side, str(source), str(out)])
    if side == "to torch_dist" and not megatron.exists():
        out.rename(megatron)
    shutil.rmtree(out, ignore_errors=True)
    return found


def main() -> None:
    """Measure every side, interleaved."""
    flags_of = _common.parser("conversion against a plain copy and against instantiating the model")
    flags_of.add_argument("--gb", type=float, default=4.0, help="gigabytes of weights, at least")
    flags_of.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: the temporary one")
    flags_of.add_argument("--megatron-python", default="", help="Python with megatron-core and mbridge; empty: without")
    flags_of.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = flags_of.parse_args()
    if flags.child:
        side, source, out = flags.child
        child(side, Path(source), Path(out))
        return
    if flags.smoke:
        flags.repeats = 1
    env.quiet_libraries()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        scratch = Path(name)
        hf, megatron = scratch / "hf", scratch / "megatron"
        hf.mkdir()
        total = generate(hf, flags.gb * 1e9, tiny=flags.smoke)
        _common.say(f"{total / 1e9:.2f} GB generated")
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(flags.repeats):
            for side in SIDES:
                runs[side].append(run_side(side, hf, megatron, scratch))
                _common.say(f"  {number + 1}/{flags.repeats} {side}: {runs[side][-1]['seconds']:.2f} s")
        if flags.megatron_python and not flags.smoke:
            script = ["-m", "benchmarks.mbridge_convert", str(hf), str(scratch / "mbridge")]
            runs["instantiate and save"] = [measure([flags.megatron_python, *script])]
        result = summarise(runs, total)
    _common.finish("convert", result, save=flags.save)


def summarise(runs: dict[str, list[dict[str, float]]], total: int) -> dict[str, Any]:
    """Medians; speeds as shares of the copy's, memory as a share of the instantiating path's."""
    copied = statistics.median(r["seconds"] for r in runs["copy"])
    sides: dict[str, dict[str, Any]] = {}
    for name, measured in runs.items():
        middle = {key: statistics.median(m[key] for m in measured) for key in measured[0]}
        sides[name] = {
            "seconds": middle["seconds"],
            "whole": middle["whole"],
            "cpu_seconds": middle["cpu_seconds"],
            "gb_per_s": total / middle["seconds"] / 1e9,
            "of_copy_speed": copied / middle["seconds"],
            "peak_gb": middle["peak_bytes"] / 1e9,
            "spread": _common.spread([m["seconds"] for m in measured]),
        }
    _common.show(f"conversion of {total / 1e9:.2f} GB", [{"side": name, **row} for name, row in sides.items()])
    slime = [row for name, row in sides.items() if name.startswith("to ")]
    peak, other = max(row["peak_gb"] for row in slime), sides.get("instantiate and save")
    return {
        "against": "copy of the same bytes",
        "bytes": total,
        "ratio": min(row["of_copy_speed"] for row in slime),
        "compared": other is not None,
        "memory_of_instantiating": peak / other["peak_gb"] if other else None,
        "sides": sides,
    }


if __name__ == "__main__":
    main()
