"""What a supervised pool knows of its engines, and what it does about those that are lost."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slimecli import console
from slimecli.errors import SlimeError

if TYPE_CHECKING:
    from slimecli.engines.http import HttpEngine
    from slimecli.recipe import Recipe
    from slimecli.sync.stage import StagedWeights


class EnginesLostError(SlimeError):
    """An engine is lost and the recipe says to stop, or none is left: nothing more can be generated."""


class Front(Protocol):
    """A router that must know which engines there are."""

    url: str

    def add(self, url: str) -> None:
        """A new engine."""

    def remove(self, url: str) -> None:
        """One that is gone."""

    def close(self) -> None:
        """Stop it."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is done about an engine that dies or falls silent."""

    restart: bool = True
    max_restarts: int = 3
    interval_s: float = 5.0
    """between two looks at an engine that has requests in flight (seconds)"""
    deadline_s: float = 60.0
    """silence after which it is given up (seconds)"""
    retries: int = 2
    """further engines that a request is given to"""
    start_timeout_s: float = 300.0
    """how long requests wait for an engine when none is there, beyond what restarts take (seconds)"""
    sync_timeout_s: float = 300.0
    """deadline for a new engine to take the current weights (seconds)"""

    @classmethod
    def of(cls, recipe: Recipe) -> Policy:
        """As a recipe has it."""
        section = recipe.engine
        return cls(
            restart=section.on_failure == "restart",
            max_restarts=section.max_restarts,
            interval_s=section.health_interval_s,
            deadline_s=section.health_deadline_s,
            retries=recipe.rollout.max_retries,
            start_timeout_s=section.start_timeout_s,
            sync_timeout_s=recipe.sync.timeout_s,
        )


@dataclass(eq=False)
class Seat:
    """The place of one engine in the pool."""

    number: int
    state: Literal["up", "stale", "down", "out"] = "up"
    """stale: runs, and waits for weights; down: is being started anew; out: is not started again"""
    why: str = ""
    """what happened to it last"""
    restarts: int = 0
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    """requests in flight there"""
    watch: asyncio.Task[None] | None = None
    thread: threading.Thread | None = None

    @property
    def is_starting(self) -> bool:
        """Whether an engine is being started for it."""
        return self.state == "down" and self.thread is not None and self.thread.is_alive()


class GivenUpError(Exception):
    """The engine that a request waited for was given up."""


class StaleError(Exception):
    """An answer comes from weights that are older than those that every engine must hold."""


def check_version(answer: Any, version: int) -> Any:
    """The answer, or the list of them; StaleError where weights before `version` spoke last: whoever runs the engine
    has started it anew, and it refused nobody meanwhile."""
    for reply in answer if isinstance(answer, list) else [answer]:
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        said = str((meta or {}).get("weight_version") or version)
        if version >= 0 and not (said.isdigit() and int(said) >= version):
            raise StaleError(f"it answers with weights of version {said}, not {version}: it was started anew")
    return answer


async def bring_up_to_date(engine: HttpEngine, staged: StagedWeights, timeout_s: float) -> str:
    """Have one engine take the current weights; what it then holds. No request runs there yet."""
    from slimecli.sync.push import push

    (receipt,) = await push([engine], staged, timeout_s)
    return f"holds version {receipt.version}"


def tell(log: Path | None, text: str) -> None:
    """An event: for the person watching, and a line in a file."""
    console.warn(text)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as lines:
            lines.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")


def tell_router(router: Front | None, log: Path | None, *, gone: str = "", new: str = "") -> None:
    """An engine came or went. A router that does not answer finds out by itself, and is restarted with all engines that
    it knew."""
    if router is None:
        return
    try:
        if gone:
            router.remove(gone)
        if new:
            router.add(new)
    except (SlimeError, OSError) as error:
        tell(log, f"the router was not told that {gone or new} is {'gone' if gone else 'there'}: {error}")
