"""Engines that somebody else started, and starts again if they die."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineRefusedError, EngineUnreachableError
from slimecli.engines.seats import Policy
from slimecli.engines.supervisor import SupervisedPool
from slimecli.errors import SlimeError

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.recipe_engine import EngineSection

PAUSE_S = 0.2
"""between two looks whether an engine is there again (seconds)"""

LOOK_S = 15.0
"""an engine that is silent for so long when it is first looked at is not there (seconds)"""
STARTING = 503
"""what a health check answers while the model is loaded"""


def attach(recipe: Recipe, *, log: Path | None = None) -> SupervisedPool:
    """Clients of engine.urls, all of which must be there. One that is lost takes part again once it answers at its
    address."""
    from slimecli.engines import connect

    check_engines(recipe)
    urls = recipe.engine.urls

    def await_return(number: int) -> HttpEngine:
        client = connect(recipe, urls[number])
        asyncio.run(_answers(client, recipe.engine.start_timeout_s))
        return client

    return SupervisedPool([connect(recipe, url) for url in urls], Policy.of(recipe), await_return, log=log)


def check_engines(recipe: Recipe) -> None:
    """Raise SlimeError naming every engine of engine.urls that does not answer within engine.urls_wait_s.

    One that is there, and says that it is starting, is waited for as long as one of our own would be.
    """
    troubles = asyncio.run(_troubles(recipe))
    if troubles:
        raise SlimeError(
            f"{len(troubles)} of {len(recipe.engine.urls)} of engine.urls cannot be asked: {'; '.join(troubles)}",
            "start them or mend engine.urls; --set engine.urls_wait_s=SECONDS waits for engines that come later",
        )


async def _troubles(recipe: Recipe) -> list[str]:
    from slimecli.engines import connect

    clients = [connect(recipe, url) for url in recipe.engine.urls]
    found = await asyncio.gather(*(_first_look(c, recipe.engine) for c in clients))
    for client in clients:
        await client.close()
    return [why for why in found if why]


async def _first_look(engine: HttpEngine, section: EngineSection) -> str:
    """Why an engine cannot be asked; empty: it can."""
    begin = time.monotonic()
    while True:
        try:
            await asyncio.wait_for(engine.health(), LOOK_S)
        except (TimeoutError, EngineUnreachableError) as error:
            why = error.what if isinstance(error, SlimeError) else f"{engine.url} is silent for {LOOK_S:g} s"
            limit = section.urls_wait_s
        except EngineRefusedError as error:
            why = error.what
            limit = max(section.urls_wait_s, section.start_timeout_s) if error.status == STARTING else 0.0
        else:
            return ""
        if time.monotonic() - begin >= limit:
            return why
        await asyncio.sleep(PAUSE_S)


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
