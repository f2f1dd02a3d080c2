"""Waiting for Ray calls: the first error first, silence explained, and a deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slimecli import console
from slimecli.cluster.actors import lost_peer
from slimecli.cluster.ray_head import head_error
from slimecli.errors import SlimeError

_CAUSE_S = 15.0
"""how long the process that others lost is looked for; Ray notices a death within a second or two"""
_SLICE_S = 2.0
"""between two looks at what else may have happened (seconds)"""
_SOMEBODY = "a worker process"
_TELL_AFTER_S = 60.0
"""silence after which a wait is explained to the person watching"""


def wait(refs: list[Any], what: str, deadline_s: float, names: Sequence[str] = ()) -> list[Any]:
    """The results of Ray calls. The first failure ends the wait, with its own error; silence is explained.

    A rank that only lost its connection to another is no first failure: that other one is looked for.

    Args:
        names: how messages call the processes that were asked, in the order of the calls.

    Raises SlimeError: what the actor raised, that an actor or the cluster's head died, or that the deadline passed.
    """
    import ray

    called = dict(zip(refs, names, strict=bool(names)))
    start = told = time.monotonic()
    pending = list(refs)
    while pending:
        left = max(0.0, start + deadline_s - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=min(_SLICE_S, left))
        for ref in done:
            _check(ref, pending, what, called)
        if lost := head_error():
            raise lost
        now = time.monotonic()
        if pending and now - told > _TELL_AFTER_S:
            told = now
            console.note(f"waiting {now - start:.0f} s for {what}: {len(pending)} of {len(refs)} not done")
        if pending and now - start >= deadline_s:
            raise SlimeError(f"gave up after {deadline_s:g} s waiting for {what}", "see logs/latest in the run")
    return [_result(ref, what, called) for ref in refs]


def _check(ref: Any, others: list[Any], what: str, called: Mapping[Any, str]) -> None:
    """Raise if a call failed; if that is only a consequence, then for its cause."""
    import ray

    try:
        _result(ref, what, called)
    except ray.exceptions.RayTaskError as error:
        if not lost_peer(error.cause):
            raise
        end = time.monotonic() + _CAUSE_S
        while others and (left := end - time.monotonic()) > 0:
            done, others = ray.wait(others, num_returns=1, timeout=left)
            for other in done:
                _check(other, [], what, called)
        raise SlimeError(
            f"{called.get(ref, _SOMEBODY)} lost the others while we waited for {what}: {error.cause}",
            "see logs/latest in the run directory; continue with `slime run --resume`",
        ) from error


def _check_birth(death: Any, who: str, what: str) -> None:
    """Raise what the constructor of an actor raised, if that is why it is dead."""
    import ray

    begun = death.args[0] if death.args else None
    if not isinstance(begun, ray.exceptions.RayTaskError):
        return
    if isinstance(begun.cause, SlimeError):
        raise begun.cause from None
    raise SlimeError(
        f"{who} could not start while we waited for {what}: {type(begun.cause).__name__}: {begun.cause}",
        "see logs/latest in the run directory; with --debug slime shows where it failed",
    ) from begun


def _result(ref: Any, what: str, called: Mapping[Any, str]) -> Any:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SlimeError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        _check_birth(error, called.get(ref, _SOMEBODY), what)
        detail = str(error).splitlines()[0]
        raise SlimeError(
            f"{called.get(ref, _SOMEBODY)} died while we waited for {what}: {detail}",
            "see logs/latest in the run directory; continue with `slime run --resume`",
        ) from error
    except ray.exceptions.RayError as error:
        detail = str(error).partition("\n")[0]
        raise SlimeError(f"Ray lost the answer while we waited for {what}: {detail}", "see logs/latest") from error
