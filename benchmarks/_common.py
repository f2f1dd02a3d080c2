"""Shared by the benchmarks: clocks, machine facts, interleaved repeats and the way a result is told and kept."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli import files

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parent.parent
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one call took."""

    wall: float
    """seconds by the clock"""
    cpu: float
    """seconds of processor time of this process, all threads"""


def parser(description: str, repeats: int = 3) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--repeats", type=int, default=repeats, help="times each side is measured, interleaved")
    flags.add_argument("--smoke", action="store_true", help="sizes that end in seconds; the figures mean nothing")
    flags.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    return flags


def synchronise() -> None:
    """Wait until the accelerator, if there is one, has done what it was asked."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> Timing:
    """Wall and CPU seconds of one call."""
    gc.collect()
    synchronise()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronise()
    return Timing(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def interleave(sides: Mapping[str, Callable[[], Any]], repeats: int, warm_ups: int = 1) -> dict[str, list[Timing]]:
    """Measure A, B, A, B, ...: what else the machine does then hits all sides alike. The warm-ups are not kept."""
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    for number in range(-warm_ups, repeats):
        for name, work in sides.items():
            timing = timed(work)
            if number >= 0:
                timings[name].append(timing)
    return timings


def medians(timings: Sequence[Timing]) -> Timing:
    """Median of each clock."""
    return Timing(wall=statistics.median(t.wall for t in timings), cpu=statistics.median(t.cpu for t in timings))


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how far to trust the figure."""
    return (max(values) - min(values)) / statistics.median(values)


def tree_cpu_seconds(root: int) -> float:
    """Processor seconds used so far by a process and all its living descendants, reaped children included."""
    stats: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended between the listing and the read
            # the command name, in parentheses, may hold spaces; fields count from after it
            tail = text[text.rindex(")") + 2 :].split()
            stats[int(entry.name)] = (int(tail[1]), sum(int(x) for x in tail[11:15]))
    wanted, found = {root}, True
    while found:
        more = {pid for pid, (parent, _) in stats.items() if parent in wanted} - wanted
        found = bool(more)
        wanted |= more
    return sum(ticks for pid, (_, ticks) in stats.items() if pid in wanted) / _TICKS


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def finish(name: str, result: Mapping[str, Any], *, save: bool) -> None:
    """One JSON line on stdout; with `save` also benchmarks/results/NAME.json."""
    whole = {"benchmark": name, **result, "machine": machine()}
    sys.stdout.write(json.dumps(whole, sort_keys=True) + "\n")
    sys.stdout.flush()
    if save:
        path = RESULTS / f"{name}.json"
        files.write_text(path, json.dumps(whole, indent=2, sort_keys=True) + "\n")
        say(f"saved {path}")


def say(text: str) -> None:
    """A line for the person watching."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for the person watching; numbers with four digits."""
    columns = list(rows[0])
    cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    say(f"\n{title}")
    for line in cells:
        say("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
