"""The weight calls of an engine behind HTTP: one client for embedded servers and SGLang servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from slimecli.engines.http_errors import EngineRefusedError
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.types import WeightReceipt
from slimecli.weights.hf import HfFolder

if TYPE_CHECKING:
    import torch


class Caller(Protocol):
    """What these calls need of a client."""

    url: str

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None, doing: str) -> Any:
        """One HTTP call; the decoded JSON."""


class HttpWeights:
    """Weights of one engine at a URL."""

    def __init__(self, engine: Caller) -> None:
        self._engine = engine

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Load, then ask what is held. An SGLang server, which has no fingerprint, is compared with what it was sent;
        where that is not here to be read (kind distributed) the receipt's fingerprint is empty."""
        begin = time.perf_counter()
        version = {"weight_version": str(update.version)}
        doing = f"updating weights to version {update.version}"
        if update.kind == "shared_memory":
            payload = {"manifest": str(update.manifest), **version}
            answer = await self._engine.call("POST", "/update_weights_from_shared_memory", payload, doing)
        elif update.kind == "disk":
            payload = {"model_path": str(update.folder), **version}
            answer = await self._engine.call("POST", "/update_weights_from_disk", payload, doing)
        elif update.kind == "distributed":
            answer = await self.update_in_parts([dict(update.group or {}) | version], doing)
        else:
            raise SlimeError(
                f"weights cannot go {update.kind} to {self._engine.url}", "--set sync.kind=shared_memory or disk"
            )
        answer = answer or {}
        fingerprint = answer.get("fingerprint") or await self.fingerprint()
        if not fingerprint and update.folder is not None:
            said, fingerprint = await self._proven(HfFolder(update.folder).iterate())
            answer["version"] = said
        return WeightReceipt(
            version=update.version if "version" not in answer else int(answer["version"]),
            fingerprint=fingerprint,
            seconds=time.perf_counter() - begin,
            bytes_=int(answer.get("bytes", 0)),
        )

    async def update_in_parts(self, parts: list[dict[str, Any]], doing: str) -> Any:
        """update_weights_from_distributed between begin and end; servers before 0.5.21 have neither."""
        modern = await self._begin(doing)
        total = 0
        try:
            for part in parts:
                answer = await self._engine.call("POST", "/update_weights_from_distributed", part, doing)
                total += int((answer or {}).get("bytes", 0))
        except SlimeError:
            # the reason is raised; a server left between begin and end would refuse the next update
            with contextlib.suppress(SlimeError):
                await self._engine.call("POST", "/end_weight_update", {}, doing)
            raise
        ended = await self._engine.call("POST", "/end_weight_update", {}, doing) if modern else {}
        return {**(ended or {}), "bytes": total}

    async def _begin(self, doing: str) -> bool:
        try:
            await self._engine.call("POST", "/begin_weight_update", {}, doing)
        except EngineRefusedError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _proven(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str]:
        """(version, fingerprint) of what an SGLang server holds, once its parameters have been compared with these."""
        from slimecli.engines.sglang.proof import prove

        held, mark = await prove(self._engine, pairs)
        return held.version, mark

    async def join_group(self, payload: Mapping[str, Any]) -> None:
        """Enter a weight-update process group."""
        await self._engine.call("POST", "/init_weights_update_group", payload, "joining a weight-update group")

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        payload = {"group_name": name}
        await self._engine.call("POST", "/destroy_weights_update_group", payload, "leaving a weight-update group")

    async def fingerprint(self) -> str:
        """Over the engine's live weights; empty from a server that cannot say."""
        try:
            answer = await self._engine.call("GET", "/weights_fingerprint", None, "computing its fingerprint")
        except EngineRefusedError as error:
            if error.status == 404:
                return ""
            raise
        return str(answer["fingerprint"])
