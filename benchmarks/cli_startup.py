"""CPU seconds of `slime --help` and `slime plan` against `trl --help` and against a bare Python.

python -m benchmarks.cli_startup [--trl-python /path/to/venv/bin/python]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import _common
from benchmarks._common import Timing
from slimecli import env

SLIME = [sys.executable, "-c", "from slimecli.cli import main; main()"]


def run_once(command: list[str], folder: Path) -> Timing:
    """Start a program, wait for its end, and ask the kernel what it used."""
    wall = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=env.child_env(PYTHONPATH=str(_common.ROOT), NO_COLOR="1"),
    ) as process:
        assert process.stderr is not None
        told = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{told.decode(errors='replace')}")
    return Timing(wall=time.perf_counter() - wall, cpu=usage.ru_utime + usage.ru_stime)


def main() -> None:
    """Measure every command."""
    flags_of = _common.parser("start-up of the command line", repeats=7)
    flags_of.add_argument("--trl-python", default="", help="Python of an environment with TRL; empty: left out")
    flags = flags_of.parse_args()
    if flags.smoke:
        flags.repeats, flags.trl_python = 1, ""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "slime --help": [*SLIME, "--help"],
        "slime plan --recipe quickstart": [*SLIME, "plan", "--recipe", "quickstart"],
    }
    if flags.trl_python:
        commands["trl --help"] = [str(Path(flags.trl_python).with_name("trl")), "--help"]
    timings: dict[str, list[Timing]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, flags.repeats):
            for name, command in commands.items():
                timing = run_once(command, Path(folder))
                if number >= 0:
                    timings[name].append(timing)
    _common.finish("cli_startup", summarise(timings), save=flags.save)


def summarise(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """CPU and wall seconds per command; the ratio is over CPU seconds, which a busy machine disturbs least."""
    against = "trl --help" if "trl --help" in timings else "python -c pass"
    middles = {name: _common.medians(measured) for name, measured in timings.items()}
    rows = {
        name: {"cpu_seconds": m.cpu, "seconds": m.wall, "spread": _common.spread([t.cpu for t in timings[name]])}
        for name, m in middles.items()
    }
    _common.show("start-up", [{"command": name, **values} for name, values in rows.items()])
    ratio = middles[against].cpu / middles["slime --help"].cpu
    return {"against": against, "ratio": ratio, "commands": rows}


if __name__ == "__main__":
    main()
