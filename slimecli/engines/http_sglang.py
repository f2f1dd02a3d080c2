"""Weight updates of an SGLang server: its own calls in slime's order, and proof of what it holds afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from slimecli import files
from slimecli.engines.http_errors import EngineRefusedError
from slimecli.engines.standstill import standing_still
from slimecli.errors import SlimeError
from slimecli.protocols import Running, WeightUpdate
from slimecli.types import WeightReceipt

if TYPE_CHECKING:
    import torch

DRAIN_S = 20
"""how long one call waits for running requests to finish; asked again until the update's own deadline (seconds)"""


class Caller(Protocol):
    """What these calls need of a client."""

    url: str
    paused: bool
    """somebody has paused the engine through this client, and will continue it"""

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None, doing: str) -> Any:
        """One HTTP call; the decoded JSON."""


async def end_broken(engine: Caller, error: BaseException, doing: str) -> None:
    """End an update in parts that broke off; the caller raises the reason. A server that is left between begin and end
    stands still, and refuses the next update. Where `error` says that nobody waits any more, neither does this."""

    async def end() -> None:
        with contextlib.suppress(SlimeError):
            await engine.call("POST", "/end_weight_update", {}, doing)

    if isinstance(error, asyncio.CancelledError):
        from slimecli.engines.http import client_loop

        asyncio.run_coroutine_threadsafe(end(), client_loop())
        return
    await end()


class SglangWeights:
    """Weights of one SGLang server."""

    def __init__(self, engine: Caller) -> None:
        self._engine = engine
        self._was_paused = False
        self._touched = False

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, flush, load, continue, prove."""
        begin = time.perf_counter()
        update = await self._prepared(update)
        self._touched = False
        async with standing_still(self, update.running) as still:
            await self._send(update, f"updating weights to version {update.version}")
        pairs = _sent(update)
        version, fingerprint = await self._proven(pairs) if pairs is not None else (await self.version(), "")
        return WeightReceipt(
            version=int(version) if version.isdigit() else -1,
            fingerprint=fingerprint,
            seconds=time.perf_counter() - begin,
            bytes_=_nbytes(update),
            pause_seconds=still.seconds,
        )

    async def _prepared(self, update: WeightUpdate) -> WeightUpdate:
        """Before the server is stopped: changes become a folder of all weights, which it can load."""
        if update.kind != "disk_delta":
            return update
        from slimecli.sync.chain import materialise

        assert update.folder is not None
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(None, materialise, update.folder, update.version)
        return replace(update, folder=folder)

    # -- the order (engines.standstill) ------------------------------------------------------------------------------

    async def halt(self, running: Running) -> None:
        """SGLang's pause ends what runs (`abort`) or puts it back (`retract`); its flush waits for what runs."""
        self._was_paused = self._engine.paused
        if self._was_paused:
            return
        if running == "finish":
            while not await self._flushed():
                await asyncio.sleep(0.1)
        mode = {"mode": "retract" if running == "continue" else "abort"}
        try:
            await self._engine.call("POST", "/pause_generation", mode, "pausing")
        except BaseException:
            await self.go(True)  # nobody knows whether it stopped
            raise

    async def flush(self) -> bool:
        """Nothing runs, so that SGLang's cache can go; requests that were put back are in nobody's way."""
        return self._was_paused or await self._flushed()

    async def _flushed(self) -> bool:
        try:
            await self._engine.call("POST", f"/flush_cache?timeout={DRAIN_S}", {}, "waiting for running requests")
        except EngineRefusedError as error:
            if error.status != 400:
                raise
            return False
        return True

    async def go(self, ok: bool) -> None:
        """Continue, unless weights were sent and did not arrive: SGLang would answer with whatever it holds now."""
        if self._was_paused or (self._touched and not ok):
            return
        await self._engine.call("POST", "/continue_generation", {}, "continuing")

    # -- the kinds ---------------------------------------------------------------------------------------------------

    async def _send(self, update: WeightUpdate, doing: str) -> None:
        version = {"weight_version": str(update.version), "flush_cache": not self._was_paused}
        if update.kind in ("disk", "disk_delta"):
            self._touched = True
            payload = {"model_path": str(update.folder), **version}
            await self._engine.call("POST", "/update_weights_from_disk", payload, doing)
        elif update.kind == "distributed":
            payload = {**(update.group or {}), **version}
            await self._in_parts("/update_weights_from_distributed", [payload], doing)
        elif update.kind in ("tensor", "shared_memory"):
            await self._send_buckets(update, version, doing)
        else:
            raise SlimeError(f"weights cannot go {update.kind} to {self._engine.url}", "--set sync.kind=tensor or disk")

    async def _send_buckets(self, update: WeightUpdate, version: Mapping[str, Any], doing: str) -> None:
        from slimecli.sync import buckets, sglang_wire

        info = await self._engine.call("GET", "/server_info", None, "describing itself")
        ranks = int(info.get("tp_size", 1))
        given = list(update.buckets or ())
        if update.kind == "shared_memory":
            assert update.manifest is not None
            given = [buckets.of_manifest(update.manifest)]
        with contextlib.ExitStack() as stack:
            texts = [stack.enter_context(sglang_wire.offered(bucket)) for bucket in given]
            parts = [
                {"serialized_named_tensors": [text] * ranks, "load_format": "flattened_bucket", **version}
                for text in texts
            ]
            await self._in_parts("/update_weights_from_tensor", parts, doing)

    async def _in_parts(self, path: str, parts: list[dict[str, Any]], doing: str) -> None:
        """Parts between begin and end; servers before 0.5.21 have neither."""
        modern = True
        try:
            await self._engine.call("POST", "/begin_weight_update", {}, doing)
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            modern = False
        self._touched = True
        try:
            for part in parts:
                await self._engine.call("POST", path, part, doing)
        except (SlimeError, asyncio.CancelledError) as error:
            await end_broken(self._engine, error, doing)
            raise
        if modern:
            await self._engine.call("POST", "/end_weight_update", {}, doing)

    async def version(self) -> str:
        """The weight version it names."""
        answer = await self._engine.call("GET", "/model_info", None, "telling its weight version")
        return str(answer.get("weight_version", ""))

    async def _proven(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, str]:
        """(version, fingerprint) of what it holds, once its parameters have been compared with what was sent."""
        from slimecli.engines.sglang.proof import prove

        held, mark = await prove(self._engine, pairs)
        return held.version, mark


def _sent(update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]] | None:
    """What was sent, where this process can read it again."""
    if update.folder is not None:
        from slimecli.weights.hf import HfFolder

        return HfFolder(update.folder).iterate()
    if update.manifest is not None:
        from slimecli.engines.embedded.weights import from_manifest

        return from_manifest(update.manifest)[1]
    return None


def _nbytes(update: WeightUpdate) -> int:
    """Bytes that were sent."""
    if update.folder is not None:
        from slimecli.weights.hf import HfFolder

        return HfFolder(update.folder).nbytes
    if update.group is not None:
        import torch

        described = zip(update.group["dtypes"], update.group["shapes"], strict=True)
        return sum(getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in described)
    tensors = [entry for bucket in update.buckets or () for entry in bucket["tensors"]]
    if update.manifest is not None:
        tensors = files.read_json(update.manifest)["tensors"]
    return sum(entry["nbytes"] for entry in tensors)
