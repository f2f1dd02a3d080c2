"""Engines that somebody else started, and starts again if they die."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slimecli.engines.http import HttpEngine
from slimecli.engines.seats import Policy
from slimecli.engines.supervisor import SupervisedPool
from slimecli.errors import SlimeError

if TYPE_CHECKING:
    from slimecli.recipe import Recipe

PAUSE_S = 0.2
"""between two looks whether an engine is there again (seconds)"""


def attach(recipe: Recipe, *, log: Path | None = None) -> SupervisedPool:
    """Clients of engine.urls. One that is lost takes part again once it answers at its address."""
    from slimecli.engines import connect

    urls = recipe.engine.urls

    def await_return(number: int) -> HttpEngine:
        client = connect(recipe, urls[number])
        asyncio.run(_answers(client, recipe.engine.start_timeout_s))
        return client

    return SupervisedPool([connect(recipe, url) for url in urls], Policy.of(recipe), await_return, log=log)


async def _answers(engine: HttpEngine, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            await asyncio.wait_for(engine.health(), max(PAUSE_S, end - time.monotonic()))
        except (SlimeError, TimeoutError):
            if time.monotonic() >= end:
                await engine.close()
                raise SlimeError(
                    f"the engine at {engine.url} did not come back within {timeout_s:g} s", "start it again"
                ) from None
            await asyncio.sleep(PAUSE_S)
        else:
            return
