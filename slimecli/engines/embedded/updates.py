"""Weight updates of the embedded engine: every kind, in one order, on the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded import buckets, changes, distributed, weights
from slimecli.engines.embedded.slot_model import SlotModel
from slimecli.engines.embedded.worker import Worker
from slimecli.engines.standstill import standing_still
from slimecli.errors import SlimeError
from slimecli.protocols import Running, WeightUpdate
from slimecli.types import WeightReceipt

POLL_S = 0.005
"""between two looks whether the running requests have finished (seconds)"""


class EngineWeights:
    """The weights of one engine and all ways to change them.

    Args:
        asleep: tags whose memory is given back; `weights` among them refuses every update.
    """

    def __init__(self, model: SlotModel, worker: Worker, book: weights.WeightBook, asleep: set[str]) -> None:
        self.book = book
        self._model = model
        self._worker = worker
        self._asleep = asleep
        self._groups = distributed.Groups()

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._worker.call(work))

    # -- every kind --------------------------------------------------------------------------------------------------

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, flush, load, fingerprint, continue."""
        version, running = str(update.version), update.running
        if update.kind == "in_process":
            return await self.from_tensors(update.tensors or {}, version, running)
        if update.kind == "shared_memory":
            return await self.from_manifest(update.manifest or Path(), version, running)
        if update.kind == "tensor":
            return await self.from_buckets(list(update.buckets or ()), version, running)
        if update.kind == "disk":
            return await self.from_folder(update.folder or Path(), version, running)
        if update.kind == "disk_delta":
            return await self.from_chain(update.folder or Path(), version, running)
        return await self.from_group(update.group or {}, version, running)

    async def from_tensors(
        self, tensors: Mapping[str, torch.Tensor], version: str | None, running: Running = "finish"
    ) -> WeightReceipt:
        """From tensors in this process."""
        incoming = weights.Incoming(headers=weights.headers_of(tensors), tensors=tensors.items())
        return await self._take(lambda: [incoming], version, running)

    async def from_manifest(self, manifest: Path, version: str | None, running: Running = "finish") -> WeightReceipt:
        """From shared memory."""
        headers, tensors, stored = weights.from_manifest(manifest)
        if version is not None and version.isdigit() and int(version) != stored:
            raise weights.WeightsRefused(f"{manifest} holds version {stored}, not {version}", "write the weights again")
        incoming = weights.Incoming(headers=headers, tensors=tensors)
        return await self._take(lambda: [incoming], version or str(stored), running)

    async def from_buckets(
        self, parts: list[Mapping[str, Any]], version: str | None, running: Running = "finish"
    ) -> WeightReceipt:
        """From flat buffers in shared or device memory."""
        opened = [buckets.open_bucket(part) for part in parts]
        headers = [h for part_headers, _ in opened for h in part_headers]
        incoming = weights.Incoming(headers=headers, tensors=(pair for _, pairs in opened for pair in pairs))
        return await self._take(lambda: [incoming], version, running)

    async def from_folder(self, folder: Path, version: str | None, running: Running = "finish") -> WeightReceipt:
        """From an HF folder."""
        stored = weights.FolderWeights(folder)
        incoming = weights.Incoming(headers=stored.headers, tensors=stored.tensors())
        return await self._take(lambda: [incoming], version, running)

    async def from_chain(self, chain: Path, version: str | None, running: Running = "finish") -> WeightReceipt:
        """From a folder of versions: the changes since what is held, or where that is not in it, all weights."""
        held: str = await self._call(lambda: changes.held_by(self.book))
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(None, changes.check_ahead, self.book, chain, version, held)
        return await self._take(lambda: changes.steps(self.book, chain, version, checked), version, running)

    async def from_changes(self, folder: Path, version: str | None, running: Running = "finish") -> WeightReceipt:
        """From one folder of changes, which must be from the weights that are held."""
        return await self._take(lambda: [changes.apply(self.book, folder, version or "")], version, running)

    async def from_group(
        self, group: Mapping[str, Any], version: str | None, running: Running = "finish"
    ) -> WeightReceipt:
        """Broadcast from rank 0 of a process group that `join_group` entered."""
        headers = distributed.headers(group)
        tensors = self._groups.receive(group, headers, self._model.device)
        incoming = weights.Incoming(headers=headers, tensors=tensors)
        return await self._take(lambda: [incoming], version, running)

    # -- the order ---------------------------------------------------------------------------------------------------

    async def _take(
        self, find: Callable[[], Iterable[weights.Incoming]], version: str | None, running: Running
    ) -> WeightReceipt:
        name = version or self._worker.scheduler.version
        if self.book.pending is not None:  # begin() has made the engine stand still
            receipt: WeightReceipt = await self._call(lambda: self.load(find(), name))
            return receipt
        async with standing_still(self, running) as still:
            receipt = await self._call(lambda: self.load(find(), name))
        return replace(receipt, pause_seconds=still.seconds)

    async def halt(self, running: Running) -> None:
        """Stop stepping. Where somebody has paused the engine, running requests stay as they left them."""
        try:
            while not await self._call(lambda: self._halted(running)):
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self._call(self._admit)
            raise

    def _halted(self, running: Running) -> bool:
        """On the engine's thread: True once it stands still."""
        scheduler, hold = self._worker.scheduler, self._worker.hold
        if "update" in hold:
            raise weights.WeightsRefused("a weight update is in progress already", "wait for its end")
        if not hold:
            if running == "abort":
                scheduler.abort()
            elif running == "continue":
                scheduler.retract()
            elif scheduler.active:
                scheduler.admitting = False
                return False
        hold.add("update")
        return True

    def _admit(self) -> None:
        """On the engine's thread: requests that wait are taken in again."""
        self._worker.scheduler.admitting = True

    async def flush(self) -> bool:
        """Forget cached prompts."""
        await self._call(self._worker.scheduler.prefixes.clear)
        return True

    async def go(self, ok: bool) -> None:
        """Continue. Weights that are not whole keep the engine from generating by themselves (WeightBook.trouble)."""

        def work() -> None:
            scheduler = self._worker.scheduler
            self._admit()
            if self.book.pending is None:
                self._worker.hold.discard("update")
            if not ok and self.book.trouble and scheduler.busy:
                scheduler.fail_all(SlimeError(f"the engine cannot go on: {self.book.trouble}", "push all weights"))

        await self._call(work)

    def load(self, steps: Iterable[weights.Incoming], version: str) -> WeightReceipt:
        """On the engine's thread, step by step: check, load, fingerprint. Each step ends with whole weights."""
        begin, total, hows, mark, name = time.perf_counter(), 0, [], "", version
        if "weights" in self._asleep:
            raise weights.WeightsRefused("the weights are asleep", "wake them before pushing")
        for incoming in steps:
            name = incoming.version or version
            loaded = self.book.load(incoming.headers, incoming.tensors, whole=incoming.whole)
            total += loaded if incoming.bytes_ is None else incoming.bytes_
            self._worker.scheduler.new_version(name)
            mark = self.book.fingerprint() if self.book.pending is None else ""
            if incoming.wanted and mark != incoming.wanted:
                self.book.trouble = f"the weights have fingerprint {mark} after the update, not {incoming.wanted}"
                raise SlimeError(self.book.trouble, "push all weights")
            hows.append(incoming.how)
        seconds = time.perf_counter() - begin
        number = int(name) if name.isdigit() else -1
        how = "+".join(dict.fromkeys(hows))
        return WeightReceipt(version=number, fingerprint=mark, seconds=seconds, bytes_=total, how=how)

    # -- in parts ----------------------------------------------------------------------------------------------------

    async def begin(self, running: Running = "finish") -> None:
        """An update in parts starts: nothing is generated until `end`."""
        if self.book.pending is not None:
            raise weights.WeightsRefused("a weight update is in progress already", "call end_weight_update first")
        async with standing_still(self, running):
            await self._call(self.book.begin)

    async def end(self) -> None:
        """The update in parts is over; raises when something was left out."""

        def work() -> None:
            if self.book.pending is None:
                raise weights.WeightsRefused("no weight update is in progress", "call begin_weight_update first")
            self._worker.hold.discard("update")
            try:
                self.book.end()
            except SlimeError as error:
                self._worker.scheduler.fail_all(error)
                raise

        await self._call(work)

    @property
    def updating(self) -> bool:
        """True between begin and end."""
        return self.book.pending is not None

    async def join_group(self, payload: Mapping[str, Any]) -> None:
        """Enter a weight-update process group."""
        await asyncio.get_running_loop().run_in_executor(None, self._groups.join, dict(payload))

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        await self._call(lambda: self._groups.leave(name))

    def close(self) -> None:
        """Leave all groups."""
        self._groups.close()

    # -- what is held ------------------------------------------------------------------------------------------------

    async def fingerprint(self) -> str:
        """Over the engine's own live weights."""
        return str(await self._call(self.book.fingerprint))

    async def digests(self) -> dict[str, str]:
        """One digest per live weight."""
        found: dict[str, str] = await self._call(self.book.digests)
        return found
