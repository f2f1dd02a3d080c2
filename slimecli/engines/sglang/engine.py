"""An engine whose SGLang server is this process's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimecli.engines import api_key, longest_call
from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.engines.sglang.launch import Server, start_server
from slimecli.recipe import Recipe


class SglangEngine(HttpEngine):
    """The client of a server that ends with it."""

    def __init__(self, server: Server, *, timeout_s: float, api_key: str = "", retries: int = 2) -> None:
        super().__init__(server.url, timeout_s=timeout_s, api_key=api_key, retries=retries)
        self.server = server

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None, doing: str) -> Any:
        """HttpEngine.call; where the server has died, the error says how."""
        try:
            return await super().call(method, path, payload, doing)
        except EngineUnreachableError as error:
            if self.server.alive():
                raise
            told = EngineUnreachableError(f"{self.server.trouble()} (while {doing})", f"see {self.server.log}")
            raise told from error

    async def close(self) -> None:
        """Close the connections and end the server. Idempotent."""
        await super().close()
        await asyncio.get_running_loop().run_in_executor(None, self.server.close)


def open_sglang(recipe: Recipe, model_dir: Path, log: Path) -> SglangEngine:
    """Start a server on an HF folder and wait until it answers."""
    server = start_server(recipe, model_dir, log=log)
    return SglangEngine(
        server, timeout_s=longest_call(recipe), retries=recipe.rollout.max_retries, api_key=api_key(recipe)
    )
