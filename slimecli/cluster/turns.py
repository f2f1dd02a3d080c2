"""Trainer and engines on the same devices, in turn.

    generate    engines have weights and KV cache      the trainer rests in host memory
    share       engines have weights, no KV cache      the trainer is awake: weights are published, checkpoints made
    learn       engines hold nothing                   the trainer is awake

The order within a step is generate, learn, share, generate: engines that lost their weights get them with the next
publication, before they answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from slimecli.protocols import RolloutEngine

Phase = Literal["generate", "share", "learn"]
RUNNING: dict[Phase, tuple[tuple[str, ...], bool]] = {
    "generate": (("weights", "kv_cache"), False),
    "share": (("weights",), True),
    "learn": ((), True),
}
"""phase -> (what engines hold, whether the trainer is awake)"""


def nobody_waits(phase: Phase) -> None:
    """Where trainer and engines have devices of their own, it is everybody's turn."""


class Rests(Protocol):
    """A trainer that can give up its device."""

    def sleep(self) -> None:
        """Move everything to host memory."""

    def wake(self) -> None:
        """Move it back."""


class Turns:
    """Whose turn it is. In the beginning engines are as they were opened, and the trainer rests.

    Args:
        run: runs a coroutine to its end, on the loop that the engine is used from.
        timed: context manager around every change, for the time it takes.
    """

    def __init__(
        self,
        trainer: Rests,
        engine: RolloutEngine,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        timed: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._run = run
        self._timed = timed
        self._held: tuple[str, ...] = ("weights", "kv_cache")
        self._awake = False

    def take(self, phase: Phase) -> None:
        """Make it this phase: first whoever has to leave leaves, then the others come. Idempotent."""
        held, awake = RUNNING[phase]
        if (held, awake) == (self._held, self._awake):
            return
        with self._timed():
            leaving = tuple(tag for tag in self._held if tag not in held)
            if leaving:
                self._run(self._engine.sleep(leaving))
            if self._awake and not awake:
                self._trainer.sleep()
            if awake and not self._awake:
                self._trainer.wake()
            coming = tuple(tag for tag in held if tag not in self._held)
            if coming:
                self._run(self._engine.wake(coming))
            self._held, self._awake = held, awake
