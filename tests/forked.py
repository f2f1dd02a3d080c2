"""Run `slime` command lines in forked children: imports are made once, and a case costs a fraction of a second.

A child can be killed with SIGKILL at its n-th fsync: every durable write of slime passes there, so the kill points are
exactly the places where a crash could leave something half done.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTS = (
    "reasoning_gym",
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "slimecli.commands.run",
    "slimecli.data_tools.prepare",
    "slimecli.engines.embedded.engine",
    "slimecli.engines.embedded.server",
    "slimecli.observe.display",
    "slimecli.pipeline",
    "slimecli.plan",
    "slimecli.session",
    "slimecli.trainers.fsdp",
    "slimecli.weights.convert",
    "slimecli.weights.datasets",
    "slimecli.weights.source",
)
"""modules that a run spends seconds on, three quarters of the time of a tiny one"""
SERVER = multiprocessing.get_context("forkserver")
"""forks of a process that has made these imports, and has no threads"""
SERVER.set_forkserver_preload([*IMPORTS])


@functools.cache
def import_all() -> None:
    """In the parent, before the first fork; and what a process computes once: transformers' patterns, the registry."""
    from transformers import conversion_mapping

    from slimecli import model_specs

    for name in IMPORTS:
        importlib.import_module(name)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
    model_specs.registry()


@dataclass(frozen=True)
class Outcome:
    code: int
    """exit code; -9 when killed"""
    out: str
    err: str
    fsyncs: int
    """durable writes made"""


def _child(argv: list[str], folder: str, kill_at: int, out: str, err: str, count: str, stdin: bytes) -> None:
    gc.freeze()  # a collection looks at the child's own objects, not at hundreds of thousands of imported ones
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))  # multiprocessing gives the child none
    os.environ["SLIME_RUNS"] = str(Path(folder) / "runs")
    sys.stdout = Path(out).open("w")  # noqa: SIM115 - for the life of the process
    sys.stderr = Path(err).open("w")  # noqa: SIM115
    made = [0]

    def fsync(fd: int) -> None:
        made[0] += 1
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.fstat(fd)  # no wait for the disk: what the kernel has, a kill does not take

    os.fsync = fsync
    from slimecli.cli import run

    code = run(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(count).write_text(str(made[0]))
    os._exit(code)


def _ends(child: BaseProcess, timeout_s: float) -> bool:
    """Start it and wait; one that is late, or that nobody waits for any more, is killed."""
    child.start()
    try:
        child.join(timeout_s)
    finally:
        if is_late := child.is_alive():
            child.kill()
            child.join()
    return not is_late


def slime(*argv: str, folder: Path, kill_at: int = 0, timeout_s: float = 500, stdin: bytes = b"") -> Outcome:
    """Run one command line in a forked child with `folder` as working directory."""
    import_all()
    out, err, count = folder / ".stdout", folder / ".stderr", folder / ".count"
    count.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    words = (list(argv), str(folder), kill_at, str(out), str(err), str(count), stdin)
    child = context.Process(target=_child, args=words)
    if not _ends(child, timeout_s):
        raise AssertionError(f"slime {' '.join(argv)} did not end within {timeout_s} s:\n{err.read_text()[-4000:]}")
    fsyncs = int(count.read_text()) if count.exists() else 0
    return Outcome(child.exitcode or 0, out.read_text(), err.read_text(), fsyncs)


def _spawned(argv: list[str], folder: str, variables: dict[str, str], out: str, err: str) -> None:
    gc.freeze()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for name, number in ((out, 1), (err, 2)):  # of this process and of those that it starts
        with Path(name).open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    from slimecli.cli import main

    sys.argv = ["slime", *argv]
    main()


def spawn_slime(*argv: str, folder: Path, timeout_s: float = 500) -> Outcome:
    """Run one command line in a fork of another process: Ray's client library hangs in a fork of one with threads."""
    root = Path(__file__).parents[1]
    variables = {**os.environ, "SLIME_RUNS": str(folder / "runs"), "PYTHONPATH": str(root)}
    out, err = folder / ".stdout", folder / ".stderr"
    child = SERVER.Process(target=_spawned, args=(list(argv), str(folder), variables, str(out), str(err)))
    if not _ends(child, timeout_s):
        raise AssertionError(f"slime {' '.join(argv)} did not end within {timeout_s} s:\n{err.read_text()[-4000:]}")
    return Outcome(child.exitcode or 0, out.read_text(), err.read_text(), 0)


def succeed(*argv: str, folder: Path, run: Callable[..., Outcome] = slime) -> Outcome:
    """A command line that must exit 0."""
    outcome = run(*argv, folder=folder)
    assert outcome.code == 0, f"slime {' '.join(argv)} -> {outcome.code}\n{outcome.err[-6000:]}"
    return outcome
