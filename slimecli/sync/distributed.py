"""Weights by broadcast (NCCL, or gloo on CPUs) from the trainer's process to all engines.

The trainer `offer`s: a thread holds the tensors and waits at a small TCP store. The driver `push`es: it tells the store
how many engines there are, has them join the group, and asks them to receive while the thread broadcasts. A refusal
reaches the driver as the engine's answer; the trainer itself never waits for an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it at run time only

from slimecli.errors import SlimeError
from slimecli.ports import listen
from slimecli.types import WeightReceipt

if TYPE_CHECKING:
    from slimecli.protocols import RolloutEngine
    from slimecli.sync.stage import StagedWeights

PATIENCE = datetime.timedelta(seconds=300)
"""how long an offer stands"""
POLL_S = 0.05
"""between two looks whether the trainer has its checksums (seconds)"""
RECEIVED_KEYS = ("names", "dtypes", "shapes", "group_name")
"""what update_weights_from_distributed takes"""


def offer(tensors: Mapping[str, torch.Tensor], version: int, *, one_host: bool = False) -> dict[str, Any]:
    """Start the thread that will broadcast; returns what the driver must know, JSON-ready.

    The tensors are held until they are sent, refused, or PATIENCE is over.

    Args:
        one_host: all engines are on this machine: nothing listens beyond loopback.
    """
    address = "127.0.0.1" if one_host else _own_address()
    # a store that opens its own socket listens on all interfaces
    control, group = listen(address), listen(address)
    control_port, group_port = control.getsockname()[1], group.getsockname()[1]
    store = TCPStore(
        address, control_port, None, True, PATIENCE, wait_for_workers=False, master_listen_fd=control.detach()
    )
    on_gpu = any(t.is_cuda for t in tensors.values())
    described: dict[str, Any] = {
        "names": list(tensors),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "group_name": f"slime-{version}-{os.getpid()}-{secrets.token_hex(4)}",
        "backend": "nccl" if on_gpu else "gloo",
        "master_address": address,
        "master_port": group_port,
        "control_port": control_port,
    }
    work = (store, group, dict(tensors), described)
    threading.Thread(target=_serve, args=work, name="weight-offer", daemon=True).start()
    return described


def _serve(store: Any, door: socket.socket, tensors: dict[str, torch.Tensor], described: dict[str, Any]) -> None:
    """Wait for the driver, join the group as rank 0, broadcast in order."""
    from slimecli.engines.embedded.distributed import open_group

    try:
        world = int(store.get("world"))
        if world == 0:
            return
        address = (described["master_address"], described["master_port"])
        group = open_group(address, 0, world, described["group_name"], described["backend"], door.detach())
        try:
            store.wait(["go"], PATIENCE)
            if store.get("go") == b"yes":
                for tensor in tensors.values():
                    torch.distributed.broadcast(tensor.contiguous(), src=0, group=group)
                store.set("sent", "")
                _tell_checksums(store, tensors)
                store.wait(["left"], PATIENCE)
        finally:
            torch.distributed.destroy_process_group(group)
    except RuntimeError as error:  # torch.distributed's own errors, DistBackendError among them
        with contextlib.suppress(RuntimeError):
            store.set("trouble", str(error))
    finally:
        door.close()  # of no effect once the group has it


def _tell_checksums(store: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compute what SGLang servers must say of these weights, if the driver asks: only here can they be read."""
    store.wait(["prove"], PATIENCE)
    arrangements = json.loads(store.get("prove"))
    if not arrangements:
        return
    from slimecli.engines.sglang.proof import Checksums

    sums = [Checksums(**one) for one in arrangements]
    for name, tensor in tensors.items():
        for one in sums:
            one.update(name, tensor)
    store.set("checksums", json.dumps([one.ranks for one in sums]))


async def push(
    engines: Sequence[RolloutEngine], staged: StagedWeights, timeout_s: float
) -> list[WeightReceipt | BaseException]:
    """Join, receive, leave; one receipt or exception per engine.

    Raises SlimeError where the trainer's process is gone.
    """
    described = dict(staged.update.group or {})
    loop = asyncio.get_running_loop()
    try:
        store = await loop.run_in_executor(None, partial(_control, described))
        return await _push(engines, staged, store, timeout_s)
    except torch.distributed.DistError as error:  # of the store: it is in the trainer
        where = described.get("master_address")
        raise SlimeError(
            f"the trainer's offer at {where} is gone: {error}",
            "see the trainer's log; continue with `slime run --resume`",
        ) from None


async def _push(
    engines: Sequence[RolloutEngine], staged: StagedWeights, store: Any, timeout_s: float
) -> list[WeightReceipt | BaseException]:
    described = dict(staged.update.group or {})
    ranks = await asyncio.gather(*(asyncio.wait_for(_ranks(e), timeout_s) for e in engines), return_exceptions=True)
    counts = [r for r in ranks if isinstance(r, int)]
    if len(counts) < len(engines):
        store.set("world", "0")
        return _refused(ranks)
    offsets = [1 + sum(counts[:i]) for i in range(len(engines) + 1)]
    calls = [_join(e, described, offsets[i], offsets[-1]) for i, e in enumerate(engines)]
    joined = await _gather(calls, offsets[-1], timeout_s, store)
    if any(isinstance(answer, BaseException) for answer in joined):
        store.set("go", "no")
        await _leave(engines, described["group_name"])
        return _refused(joined)
    store.set("go", "yes")
    update = replace(staged.update, group={k: described[k] for k in RECEIVED_KEYS})
    updates = [asyncio.wait_for(engine.update_weights(update), timeout_s) for engine in engines]
    answers: list[WeightReceipt | BaseException] = list(await asyncio.gather(*updates, return_exceptions=True))
    answers = await _compared(engines, answers, staged, store, timeout_s)
    store.set("left", "")
    await _leave(engines, described["group_name"])
    return answers


async def _compared(
    engines: Sequence[RolloutEngine],
    answers: list[WeightReceipt | BaseException],
    staged: StagedWeights,
    store: Any,
    timeout_s: float,
) -> list[WeightReceipt | BaseException]:
    """The receipts, those of SGLang servers, which have no fingerprint, compared with the trainer's checksums."""
    from slimecli.engines.sglang.proof import Held, ask, check

    out = list(answers)
    mute = [i for i, answer in enumerate(answers) if isinstance(answer, WeightReceipt) and not answer.fingerprint]
    asked = [asyncio.wait_for(ask(engines[i]), timeout_s) for i in mute]  # type: ignore[arg-type]  # clients of servers
    told = dict(zip(mute, await asyncio.gather(*asked, return_exceptions=True), strict=True))
    # servers may be spread over different numbers of ranks, each of which holds its share
    arrangements = [json.dumps(held.arrangement) for held in told.values() if isinstance(held, Held)]
    wanted = list(dict.fromkeys(arrangements))
    store.set("prove", f"[{', '.join(wanted)}]")
    sums = await _checksums(store, timeout_s) if wanted else []
    for i, held in told.items():
        if not isinstance(held, Held):
            out[i] = held
            continue
        try:
            check(engines[i].url, held, sums[wanted.index(json.dumps(held.arrangement))])  # type: ignore[attr-defined]
            version = int(held.version) if held.version.isdigit() else -1
            out[i] = replace(answers[i], version=version, fingerprint=staged.fingerprint)  # type: ignore[type-var]
        except SlimeError as error:
            out[i] = error
    return out


async def _checksums(store: Any, timeout_s: float) -> list[Any]:
    """What the trainer computes, which takes seconds for every few GB."""
    end = time.monotonic() + timeout_s
    while not store.check(["checksums"]):
        if store.check(["trouble"]):
            told = store.get("trouble").decode()
            raise SlimeError(f"the trainer could not compute checksums of its weights: {told}", _FIX)
        if time.monotonic() > end:
            raise SlimeError(f"the trainer has no checksums of its weights after {timeout_s:g} s", _LATE)
        await asyncio.sleep(POLL_S)
    found: list[Any] = json.loads(store.get("checksums"))
    return found


def _refused(answers: Sequence[Any]) -> list[WeightReceipt | BaseException]:
    """The engines' own errors, and that of an other for those that were willing."""
    told = SlimeError("did not receive: another engine could not join the group", _FIX)
    return [answer if isinstance(answer, BaseException) else told for answer in answers]


async def _ranks(engine: RolloutEngine) -> int:
    """Processes that an engine joins with: SGLang's tensor-parallel ranks, on whichever machines they are."""
    ask = getattr(engine, "ranks", None)
    return 1 if ask is None else int(await ask())


async def _gather(calls: list[Any], world: int, timeout_s: float, store: Any) -> list[Any]:
    """Tell the trainer how large the group is, and let the engines come."""
    store.set("world", str(world))
    return await asyncio.gather(*(asyncio.wait_for(c, timeout_s) for c in calls), return_exceptions=True)


def _control(described: Mapping[str, Any]) -> Any:
    limit = datetime.timedelta(seconds=10)
    return TCPStore(described["master_address"], described["control_port"], None, False, limit)


async def _join(engine: RolloutEngine, described: Mapping[str, Any], rank: int, world: int) -> None:
    join = getattr(engine, "join_group", None)
    if join is None:
        raise SlimeError("cannot receive over a process group", "--set sync.kind=disk")
    names = ("master_address", "master_port", "group_name", "backend")
    await join({**{k: described[k] for k in names}, "rank_offset": rank, "world_size": world})


async def _leave(engines: Sequence[RolloutEngine], name: str) -> None:
    """Best effort: an engine that never joined, or died, has nothing to leave, and its fault is reported already."""
    for engine in engines:
        with contextlib.suppress(SlimeError, TimeoutError, AttributeError):
            await asyncio.wait_for(engine.leave_group(name), 30)  # type: ignore[attr-defined]


def _own_address() -> str:
    """The address by which other machines reach this one; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing; picks the interface
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


_LATE = "raise sync.timeout_s, or --set sync.kind=disk"
_FIX = "see the engine's log; --set sync.kind=disk needs no process group"
