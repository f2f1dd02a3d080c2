"""Run a function in gloo ranks: forked children, so that torch is imported once."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from slimecli.model_specs import registry
from slimecli.ports import free_port


def _child(
    rank: int, world: int, port: int, join: bool, work: Callable[..., Any], args: tuple[Any, ...], answers: Any
) -> None:
    import torch

    from slimecli import env

    # what the parent had is not looked through by every collection
    gc.freeze()

    env.set_rendezvous(rank, world, "127.0.0.1", port, rank)
    try:
        if join:
            torch.distributed.init_process_group("gloo")
        answers.put((rank, work(*args), ""))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def run_ranks(world: int, work: Callable[..., Any], *args: Any, join: bool = True, timeout_s: float = 120) -> list[Any]:
    """What `work(*args)` returns on each rank; results must be plain Python or numpy.

    Args:
        join: enter the process group first; False leaves that to `work`.
    """
    registry()  # read once, and not by every rank
    port = free_port()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_child, args=(r, world, port, join, work, args, answers)) for r in range(world)]
    for child in children:
        child.start()
    found: dict[int, Any] = {}
    for _ in children:
        rank, result, error = answers.get(timeout=timeout_s)
        if error:
            for child in children:
                child.terminate()
            raise AssertionError(f"rank {rank}:\n{error}")
        found[rank] = result
    for child in children:
        child.join(timeout_s)
    return [found[r] for r in range(world)]
