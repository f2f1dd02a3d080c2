"""`slime` command lines on several ranks, as torchrun starts them, in forks of this process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slimecli.ports import free_port
from tests.forked import import_all


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float
    """from the start of all ranks to the end of this one"""


def on_ranks(
    *argv: str, folder: Path, world: int = 2, prepare: Callable[[int], None] = lambda rank: None, timeout_s: float = 90
) -> list[Ended]:
    """Run one command line on every rank. As soon as one fails, the others get SIGTERM, as torchrun does it.

    Args:
        prepare: called with the rank in its process, before the command.
    """
    import_all()
    context, port = multiprocessing.get_context("fork"), free_port()
    children = [context.Process(target=_child, args=(r, world, port, argv, folder, prepare)) for r in range(world)]
    for child in children:
        child.start()
    begin, ends = time.monotonic(), [0.0] * world
    while any(child.is_alive() for child in children):
        assert time.monotonic() - begin < timeout_s, f"rank(s) still alive after {timeout_s} s"
        for rank, child in enumerate(children):
            if not child.is_alive() and not ends[rank]:
                ends[rank] = time.monotonic() - begin
                for other in children if child.exitcode else []:
                    other.terminate()
        time.sleep(0.02)
    told = [[(folder / f".{name}{rank}").read_text() for name in ("out", "err")] for rank in range(world)]
    return [
        Ended(child.exitcode or 0, *told[rank], seconds=ends[rank] or time.monotonic() - begin)
        for rank, child in enumerate(children)
    ]


def _child(
    rank: int, world: int, port: int, argv: tuple[str, ...], folder: Path, prepare: Callable[[int], None]
) -> None:
    import gc
    import signal

    from slimecli import cli, env

    gc.freeze()
    os.chdir(folder)
    os.environ.update(SLIME_RUNS=str(folder / "runs"), GLOO_SOCKET_IFNAME="lo")
    env.set_rendezvous(rank, world, "127.0.0.1", port, rank)
    sys.stdout = (folder / f".out{rank}").open("w", buffering=1)
    sys.stderr = (folder / f".err{rank}").open("w", buffering=1)
    if rank == 0:
        signal.signal(signal.SIGTERM, cli._on_sigterm)
    prepare(rank)
    code = cli.run(list(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
