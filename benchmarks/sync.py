"""Seconds for a weight sync, by kind, against a plain copy of the same bytes in memory.

    python -m benchmarks.sync [--size 300] [--kind shared_memory ...]

A sync is all that `publish` does: read the trainer's weights, fingerprint them, move them, load them into a live
engine, fingerprint what the engine now holds, compare. For all kinds but in_process the engine is another process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import _common
from benchmarks._common import Timing
from benchmarks._models import SHAPES, Shape, make_model
from slimecli import env
from slimecli.recipe import Recipe, validate_recipe

KINDS = ("in_process", "shared_memory", "disk")


def shape_of(megabytes: int) -> Shape:
    """Layers of Qwen3-0.6B under a small vocabulary, until about so many megabytes of float32."""
    one = replace(SHAPES["0.6b"], layers=1, vocab=8192)
    layer = one.matmul_params - one.vocab * one.hidden
    return replace(one, layers=max(1, round((megabytes * 1e6 / 4 - one.vocab * one.hidden) / layer)))


def serve(tree: dict[str, Any], folder: str, log: str, pipe: Any) -> None:
    """Body of the engine's process: tell the address, serve until told to stop."""
    from slimecli.cluster.actors import EngineHost

    host = EngineHost(tree, folder, log)
    pipe.send(host.url())
    pipe.recv()
    host.close()


class Bench:
    """A trainer's weights here, an engine here and an engine in another process."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        from safetensors.torch import load_file

        from slimecli.engines import open_engine
        from slimecli.engines.http import HttpEngine

        engine = {"slots": 1, "max_context": 64, "dtype": "float32"}
        path = {"path": str(folder), "source": "path", "dtype": "float32"}
        recipe: Recipe = validate_recipe({"model": path, "engine": engine})
        self.runner = asyncio.Runner()
        self.folder, self.scratch, self.version = folder, scratch, 0
        self.weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        self.target = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.here = open_engine(recipe, folder)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        log = str(scratch / "engine.log")
        self._process = context.Process(
            target=serve, args=(recipe.model_dump(mode="json"), str(folder), log, theirs), daemon=True
        )
        self._process.start()
        if not self._pipe.poll(120):
            raise TimeoutError(f"the engine did not start within 120 s, see {log}")
        self.there = HttpEngine(self._pipe.recv(), timeout_s=60.0)

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """What Trainer.weights() yields."""
        yield from self.weights.items()

    def copy(self) -> None:
        """The yardstick: the same bytes from one place in memory to another."""
        for name, tensor in self.weights.items():
            self.target[name].copy_(tensor)

    def sync(self, kind: Any) -> None:
        """What Session.publish does."""
        from slimecli.sync.push import push
        from slimecli.sync.stage import stage_weights

        self.version += 1
        folder = self.scratch / f"sync_{self.version}"
        staged = stage_weights(self.pairs(), kind, version=self.version, folder=folder, like=self.folder)
        engine = self.here if kind == "in_process" else self.there
        self.runner.run(push(engine, staged, 120.0))

    def close(self) -> None:
        """Stop both engines."""
        self.runner.run(self.here.close())
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
    """Measure every kind."""
    flags_of = _common.parser("weight sync against a plain copy of the same bytes", repeats=5)
    flags_of.add_argument("--size", type=int, default=300, help="megabytes of float32 weights")
    flags_of.add_argument("--kind", action="append", choices=KINDS, help="repeatable; all by default")
    flags = flags_of.parse_args()
    if flags.smoke:
        flags.size, flags.repeats = 0, 1
    env.set_threads(1)
    env.quiet_libraries()
    shape = replace(SHAPES["quickstart"]) if flags.smoke else shape_of(flags.size)
    kinds = flags.kind or list(KINDS)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(make_model(Path(scratch) / "model", shape), Path(scratch))
        timings: dict[str, list[Timing]] = {name: [] for name in ("copy", *kinds)}
        for number in range(-1, flags.repeats):
            for name, kept in timings.items():
                timing = timed_tree(bench.copy if name == "copy" else lambda name=name: bench.sync(name))
                if number >= 0:
                    kept.append(timing)
        total = sum(t.nbytes for t in bench.weights.values())
        bench.close()
    result = summarise(timings, total)
    _common.finish("sync", result, save=flags.save)


def summarise(timings: dict[str, list[Timing]], total: int) -> dict[str, Any]:
    """Seconds per kind and how many plain copies that is."""
    copy = statistics.median(t.wall for t in timings["copy"])
    kinds = {}
    for name, measured in timings.items():
        middle = _common.medians(measured)
        kinds[name] = {
            "seconds": middle.wall,
            "cpu_seconds": middle.cpu,
            "gb_per_s": total / middle.wall / 1e9,
            "copies": middle.wall / copy,
            "spread": _common.spread([t.wall for t in measured]),
        }
    _common.show(f"weight sync of {total / 1e6:.1f} MB", [{"kind": name, **values} for name, values in kinds.items()])
    best = min((k for k in kinds if k != "copy"), key=lambda k: kinds[k]["seconds"])
    return {"against": "copy of the same bytes", "bytes": total, "ratio": kinds[best]["copies"], "kinds": kinds}


if __name__ == "__main__":
    main()
