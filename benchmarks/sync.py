"""Seconds for a weight sync, by kind, against a plain copy of the same bytes in memory.

    python -m benchmarks.sync [--shape 0.6b --shape 1.7b] [--kind shared_memory ...]

A sync is all that `publish` does: read the trainer's weights, fingerprint them, move them, load them into a live
engine, fingerprint what the engine now holds, compare. For all kinds but in_process the engine is another process.
Before each, a share of the weights changes, as an optimizer step changes them: what disk_delta sends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _common
from benchmarks._common import Timing
from benchmarks._models import SHAPES, make_model
from slimecli import env
from slimecli.recipe import Recipe, validate_recipe

KINDS = ("in_process", "shared_memory", "tensor", "distributed", "disk", "disk_delta")


def serve(tree: dict[str, Any], folder: str, log: str, pipe: Any) -> None:
    """Body of the engine's process: tell the address, serve until told to stop."""
    from slimecli.cluster.actors import EngineHost

    host = EngineHost(tree, folder, log)
    pipe.send(host.url())
    pipe.recv()
    host.close()


class Bench:
    """A trainer's weights here, an engine in another process, and for in_process one here."""

    def __init__(self, folder: Path, scratch: Path, dtype: str, changing: float) -> None:
        from safetensors.torch import load_file

        from slimecli.engines.http import HttpEngine

        engine = {"slots": 1, "max_context": 64, "dtype": dtype}
        path = {"path": str(folder), "source": "path", "dtype": dtype}
        self.recipe: Recipe = validate_recipe({"model": path, "engine": engine})
        self.runner = asyncio.Runner()
        self.folder, self.scratch, self.changing, self.version = folder, scratch, changing, 0
        self.weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        self.target: dict[str, Any] = {}
        self.here: Any = None
        self.report: dict[str, float] = {}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        log = str(scratch / "engine.log")
        self._process = context.Process(
            target=serve, args=(self.recipe.model_dump(mode="json"), str(folder), log, theirs), daemon=True
        )
        self._process.start()
        if not self._pipe.poll(300):
            raise TimeoutError(f"the engine did not start within 300 s, see {log}")
        self.there = HttpEngine(self._pipe.recv(), timeout_s=120.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.nbytes for t in self.weights.values())

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """What Trainer.weights() yields."""
        yield from self.weights.items()

    def prepare(self, kind: str) -> None:
        """Not timed: what must be there, and the weights' next version."""
        import torch

        from slimecli.engines import open_engine

        if kind == "copy" and not self.target:
            self.target = {name: tensor.clone() for name, tensor in self.weights.items()}
        if kind == "in_process" and self.here is None:
            self.here = open_engine(self.recipe, self.folder)
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            count = max(1, int(flat.numel() * self.changing))
            places = torch.randint(0, flat.numel(), (count,))
            flat[places] = flat[places] * 1.01

    def release(self, kind: str) -> None:
        """Give back what only this kind needed."""
        from slimecli.sync import chain, shared_memory

        if kind == "copy":
            self.target = {}
        if self.here is not None:
            self.runner.run(self.here.close())
            self.here = None
        shared_memory.release()
        chain.forget(self.scratch / "chain")

    def copy(self) -> None:
        """The yardstick: the same bytes from one place in memory to another."""
        for name, tensor in self.weights.items():
            self.target[name].copy_(tensor)

    def sync(self, kind: Any) -> None:
        """What publishing does."""
        from slimecli.sync.push import push
        from slimecli.sync.stage import stage_weights

        self.version += 1
        folder = self.scratch / ("chain" if kind == "disk_delta" else "sync")
        staged = stage_weights(self.pairs(), kind, version=self.version, folder=folder, like=self.folder, one_host=True)
        engine = self.here if kind == "in_process" else self.there
        begin = time.perf_counter()
        receipts = self.runner.run(push(engine, staged, 120.0))
        self.report = {
            "stage_seconds": staged.seconds,
            "push_seconds": time.perf_counter() - begin,
            "pause_seconds": receipts[0].pause_seconds,
            "bytes_sent": receipts[0].bytes_,
        }

    def close(self) -> None:
        """Stop the engines."""
        self.runner.run(self.there.close())
        self.runner.close()
        self._pipe.send("stop")
        self._process.join(30)


def timed_tree(work: Callable[[], None]) -> Timing:
    """Wall seconds, and CPU seconds of this process and its engine."""
    cpu, wall = _common.tree_cpu_seconds(os.getpid()), time.perf_counter()
    work()
    return Timing(wall=time.perf_counter() - wall, cpu=_common.tree_cpu_seconds(os.getpid()) - cpu)


def main() -> None:
    """Measure every kind on every shape."""
    flags_of = _common.parser("weight sync against a plain copy of the same bytes", repeats=3)
    flags_of.add_argument("--shape", action="append", choices=list(SHAPES), help="repeatable; 0.6b by default")
    flags_of.add_argument("--kind", action="append", choices=KINDS, help="repeatable; all by default")
    flags_of.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    flags_of.add_argument("--changing", type=float, default=0.02, help="share of the weights that a step changes")
    flags = flags_of.parse_args()
    names = ["quickstart"] if flags.smoke else flags.shape or ["0.6b"]
    flags.repeats = 1 if flags.smoke else flags.repeats
    env.set_threads(1)
    env.quiet_libraries()
    shapes = {name: measured(name, flags) for name in names}
    kinds = shapes[names[0]]["kinds"]
    best = min((k for k in kinds if k != "copy"), key=lambda k: kinds[k]["seconds"])
    result = {"against": "copy of the same bytes", "ratio": kinds[best]["copies"], "shapes": shapes}
    about = {"dtype": flags.dtype, "changing": flags.changing}
    _common.finish("sync", result | about, save=flags.save)


def measured(name: str, flags: Any) -> dict[str, Any]:
    """All kinds on one shape, one after the other: each gives back its memory before the next."""
    timings: dict[str, list[Timing]] = {}
    reports: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            make_model(Path(scratch) / "model", SHAPES[name], dtype=flags.dtype),
            Path(scratch),
            flags.dtype,
            flags.changing,
        )
        for kind in ("copy", *(flags.kind or KINDS)):
            timings[kind] = []
            for number in range(-1, flags.repeats):
                bench.prepare(kind)
                timing = timed_tree(bench.copy if kind == "copy" else lambda kind=kind: bench.sync(kind))
                if number >= 0:
                    timings[kind].append(timing)
            reports[kind] = bench.report if kind != "copy" else {}
            bench.release(kind)
        total = bench.nbytes
        bench.close()
    return summarise(name, timings, reports, total)


def summarise(
    shape: str, timings: dict[str, list[Timing]], reports: dict[str, dict[str, float]], total: int
) -> dict[str, Any]:
    """Seconds per kind and how many plain copies that is."""
    copy = statistics.median(t.wall for t in timings["copy"])
    kinds = {}
    for name, found in timings.items():
        middle = _common.medians(found)
        kinds[name] = {
            "seconds": middle.wall,
            "cpu_seconds": middle.cpu,
            "gb_per_s": total / middle.wall / 1e9,
            "copies": middle.wall / copy,
            "spread": _common.spread([t.wall for t in found]),
            **reports[name],
        }
    rows = [{"kind": name, **values} for name, values in kinds.items()]
    _common.show(f"weight sync of {shape}, {total / 1e6:.1f} MB", [dict.fromkeys(rows[-1]) | row for row in rows])
    return {"bytes": total, "kinds": kinds}


if __name__ == "__main__":
    main()
