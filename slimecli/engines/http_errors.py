"""What can go wrong between a client and an engine behind HTTP."""

from __future__ import annotations

from slimecli.errors import SlimeError


class EngineUnreachableError(SlimeError):
    """No connection, or it broke."""


class EngineRefusedError(SlimeError):
    """The engine answered with an error.

    Attributes:
        status: of HTTP.
        reason: in the engine's words.
    """

    status = 0
    reason = ""

    @property
    def is_callers_fault(self) -> bool:
        """Whether the payload was wrong, and not the engine's state: trying again helps nobody."""
        return self.status in (400, 413, 422)


def refusal(url: str, doing: str, reason: str, status: int) -> EngineRefusedError:
    """An engine's refusal."""
    error = EngineRefusedError(f"the engine at {url} refused while {doing}: {reason}", "see its log")
    error.status, error.reason = status, reason
    return error
