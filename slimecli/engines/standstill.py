"""The order of a weight update, for every kind and every engine: pause, flush, update, continue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from slimecli.protocols import Running


class Haltable(Protocol):
    """An engine that can be made to stand still."""

    async def halt(self, running: Running) -> None:
        """Let running requests finish, or abort them, or put them back; returns when nothing runs.

        Who cannot leaves the engine as it was, and raises: another update may have stopped it.
        """

    async def flush(self) -> bool:
        """Forget cached prompts, whose keys and values are of the old weights; False if it could not."""

    async def go(self, ok: bool) -> None:
        """Continue. `ok`: the weights are those that were meant."""


@dataclass
class Still:
    """How long an engine stood still."""

    seconds: float = 0.0
    """known at the end"""


@contextlib.asynccontextmanager
async def standing_still(engine: Haltable, running: Running) -> AsyncIterator[Still]:
    """Weights change inside this block: no request runs in it, whatever happens to it afterwards."""
    still, begin, ok = Still(), time.perf_counter(), False
    await engine.halt(running)
    try:
        await engine.flush()
        yield still
        ok = True
    finally:
        await engine.go(ok)
        still.seconds = time.perf_counter() - begin
