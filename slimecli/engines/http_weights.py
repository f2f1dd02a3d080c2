"""The weight calls of an engine behind HTTP: one client for embedded servers and SGLang servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from slimecli.engines.http_errors import EngineRefusedError
from slimecli.engines.http_sglang import Caller, SglangWeights, end_broken
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.types import WeightReceipt


class HttpWeights:
    """Weights of one engine at a URL. An embedded server keeps the order of an update itself; SGLang is led."""

    def __init__(self, engine: Caller) -> None:
        self._engine = engine
        self._sglang = SglangWeights(engine)
        self._embedded: bool | None = None

    async def is_embedded(self) -> bool:
        """Whether an embedded server listens there; asked once."""
        if self._embedded is None:
            info = await self._engine.call("GET", "/server_info", None, "describing itself")
            self._embedded = str((info or {}).get("version", "")).startswith("slime-")
        return self._embedded

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, flush, load, verify, continue; the receipt's fingerprint is empty where nobody can tell (SGLang by
        broadcast)."""
        if not await self.is_embedded():
            return await self._sglang.update(update)
        begin = time.perf_counter()
        answer = await self._send(update, f"updating weights to version {update.version}")
        if not answer["fingerprint"]:
            raise SlimeError(
                f"the engine at {self._engine.url} is in the middle of an update in parts that somebody else began: it "
                "took these weights as a part of it, and stands still until its end",
                f"curl -X POST {self._engine.url}/end_weight_update, or start it anew",
            )
        return WeightReceipt(
            version=int(answer["version"]),
            fingerprint=answer["fingerprint"],
            seconds=time.perf_counter() - begin,
            bytes_=int(answer["bytes"]),
            pause_seconds=float(answer["pause_seconds"]),
            how=answer["how"],
        )

    async def _send(self, update: WeightUpdate, doing: str) -> dict[str, Any]:
        asked = {"weight_version": str(update.version), "running": update.running}
        calls: dict[str, tuple[str, dict[str, Any]]] = {
            "shared_memory": ("from_shared_memory", {"manifest": str(update.manifest)}),
            "tensor": ("from_buckets", {"buckets": list(update.buckets or ())}),
            "disk": ("from_disk", {"model_path": str(update.folder)}),
            "disk_delta": ("from_chain", {"chain": str(update.folder)}),
        }
        if update.kind == "distributed":
            return await self._in_parts([{**(update.group or {}), **asked}], doing)
        if update.kind not in calls:
            fix = "--set sync.kind=shared_memory or disk"
            raise SlimeError(f"weights cannot go {update.kind} to {self._engine.url}", fix)
        path, payload = calls[update.kind]
        found: dict[str, Any] = await self._engine.call("POST", f"/update_weights_{path}", {**payload, **asked}, doing)
        return found

    async def _in_parts(self, parts: list[dict[str, Any]], doing: str) -> dict[str, Any]:
        begin, total = time.perf_counter(), 0
        await self._engine.call("POST", "/begin_weight_update", {"running": parts[0]["running"]}, doing)
        try:
            for part in parts:
                answer = await self._engine.call("POST", "/update_weights_from_distributed", part, doing)
                total += int(answer["bytes"])
        except (SlimeError, asyncio.CancelledError) as error:
            await end_broken(self._engine, error, doing)
            raise
        ended = await self._engine.call("POST", "/end_weight_update", {}, doing)
        return {**ended, "bytes": total, "pause_seconds": time.perf_counter() - begin, "how": "full"}

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

    async def digests(self) -> dict[str, str]:
        """One per live weight; empty from a server that cannot say."""
        if not await self.is_embedded():
            return {}
        answer = await self._engine.call("GET", "/weights_digests", None, "computing its digests")
        return dict(answer["digests"])
