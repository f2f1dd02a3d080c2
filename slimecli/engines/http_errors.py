"""What can go wrong between a client and an engine behind HTTP."""

from __future__ import annotations

from slimecli.errors import SlimeError


class EngineUnreachableError(SlimeError):
    """No connection, or it broke."""


class EngineRefusedError(SlimeError):
    """The engine answered with an error.

    Attributes:
        status: of HTTP.
    """

    status = 0
