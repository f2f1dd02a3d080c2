"""Scores for answers. REWARDS: name -> function(sample) -> float, each in its own file; own ones by path.

Whatever goes wrong while scoring is a SlimeError that names the scorer and the sample: a failed score is counted by the
rollout, it never becomes a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from slimecli.data_tools.hooks import load_hook
from slimecli.data_tools.rewards.extract import extract_boxed
from slimecli.errors import DataError, SlimeError
from slimecli.lookup import look_up
from slimecli.recipe_sections import RewardSection
from slimecli.types import Sample

REWARDS: dict[str, str] = {
    "reasoning_gym": "slimecli.data_tools.rewards.reasoning_gym:score",
    "exact": "slimecli.data_tools.rewards.text:exact",
    "regex": "slimecli.data_tools.rewards.text:regex",
    "f1": "slimecli.data_tools.rewards.text:f1",
    "math": "slimecli.data_tools.rewards.mathematics:score",
}
"""rm_type -> function(response, label, metadata) -> score. `boxed_NAME` scores the last \\boxed{} of the response."""

Scorer = Callable[[str, str | None, dict[str, Any]], float]
RewardHook = Callable[..., Any]

MAX_PARALLEL = 8
"""scores computed at the same time; the deadline of one starts when its turn comes"""


class RewardTimeout(SlimeError):
    """A scorer did not answer in time."""


@cache
def load_scorer(name: str) -> Scorer:
    """The built-in scorer of that name."""
    base = name.removeprefix("boxed_")
    function: Scorer = look_up(
        REWARDS, base, "reward type", "types: {known}, each also as boxed_NAME; or reward.path = file.py:function"
    )
    if base == name:
        return function
    return lambda response, label, metadata: function(extract_boxed(response) or "", label, metadata)


def load_reward(section: RewardSection) -> Reward:
    """The reward function of a recipe: async (args, sample, **kw) -> float or named floats.

    With `section.group` it takes a list of samples and returns as many scores. Loading checks the name and signature;
    calling enforces `timeout_s` (RewardTimeout) and wraps what the scorer raises.
    """
    if section.path:
        hook = load_hook(section.path, ("args", "samples" if section.group else "sample"))
        name = section.path
    else:
        load_scorer(section.type)
        hook, name = _builtin(section), section.type
    return Reward(hook, name, section.timeout_s, own=bool(section.path))


class Reward:
    """A loaded reward function: called with a sample, or with a group where it scores groups."""

    def __init__(self, hook: RewardHook, name: str, timeout_s: float, *, own: bool) -> None:
        self._hook = hook
        self._name = name
        self._timeout_s = timeout_s
        self._own = own
        self._gate = _Gate()

    async def __call__(self, args: Any, subject: Any, **kwargs: Any) -> Any:
        """The score, or with a list the scores."""
        async with self._gate.here():
            result = await _call(self._hook, self._name, self._timeout_s, args, subject, kwargs)
        if isinstance(subject, list):
            return _check_group(result, subject, self._name)
        return _check_score(result, subject, self._name)

    async def each(self, args: Any, samples: list[Sample]) -> list[Any]:
        """A score, or the SlimeError instead of it, per sample.

        The built-in scorers are quick and share one thread for all samples, and one deadline; own functions run, fail
        and time out one by one.
        """
        if self._own:
            return list(await asyncio.gather(*(self._outcome(args, s) for s in samples)))

        def work() -> list[Any]:
            return [self._outcome_here(args, s) for s in samples]

        try:
            async with self._gate.here(), asyncio.timeout(self._timeout_s):
                return list(await _in_thread(work))
        except TimeoutError:
            late = _too_late(self._name, self._timeout_s, samples)
            return [late for _ in samples]

    async def _outcome(self, args: Any, sample: Sample) -> Any:
        try:
            return await self(args, sample)
        except SlimeError as error:
            return error

    def _outcome_here(self, args: Any, sample: Sample) -> Any:
        try:
            return _check_score(self._hook(args, sample), sample, self._name)
        except SlimeError as error:
            return _told(error, self._name, sample)
        except Exception as error:  # data may break a scorer in any way; it goes on as a SlimeError with its cause
            return _wrap(error, self._name, sample)


def _builtin(section: RewardSection) -> RewardHook:
    def score(args: Any, subject: Sample | list[Sample], **kwargs: Any) -> Any:
        if isinstance(subject, list):
            return [score(args, s) for s in subject]
        scorer = load_scorer(subject.metadata.get("rm_type") or section.type)
        return scorer(subject.response, subject.label, subject.metadata)

    return score


async def _call(hook: RewardHook, name: str, timeout_s: float, args: Any, subject: Any, kwargs: dict[str, Any]) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if _is_async(hook):
                return await hook(args, subject, **kwargs)
            result = await _in_thread(lambda: hook(args, subject, **kwargs))
            return await result if inspect.isawaitable(result) else result
    except TimeoutError as error:
        if not deadline.expired():
            raise _wrap(error, name, subject) from error
        raise _too_late(name, timeout_s, subject) from None
    except SlimeError as error:
        raise _told(error, name, subject) from error
    except Exception as error:  # a user's function may raise anything; it goes on as a SlimeError with its cause
        raise _wrap(error, name, subject) from error


def _too_late(name: str, timeout_s: float, subject: Any) -> RewardTimeout:
    return RewardTimeout(
        f"reward {name} took longer than {timeout_s:g} s for {_who(subject)}",
        "make it faster, or raise reward.timeout_s",
    )


def _told(error: SlimeError, name: str, subject: Any) -> SlimeError:
    kind = DataError if isinstance(error, DataError) else SlimeError
    return kind(f"reward {name} for {_who(subject)}: {error.what}", error.fix)


def _wrap(error: Exception, name: str, subject: Any) -> SlimeError:
    return SlimeError(
        f"reward {name} raised {type(error).__name__} for {_who(subject)}: {error}",
        "mend the reward function; `slime reward check DATA` tries it without a model",
    )


def _is_async(hook: RewardHook) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run in a daemon thread: one that hangs past its deadline must not keep the process from ending.

    Threads are kept for the next call, because starting one costs more than most scorers; one that hangs is not.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> Callable[[], None]:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # carried to the waiting coroutine
            failure = error if not isinstance(error, StopIteration) else RuntimeError("StopIteration")
        return lambda: tell(result, failure)

    def tell(result: Any, failure: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    try:
        inbox = _idle_threads.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="slime-reward").start()
    inbox.put(work)
    return await future


_Inbox = queue.SimpleQueue[Callable[[], Callable[[], None]]]
_idle_threads: list[_Inbox] = []
"""inboxes of the threads that wait for work"""
os.register_at_fork(after_in_child=_idle_threads.clear)  # a forked child has the list, not the threads


def _serve(inbox: _Inbox) -> None:
    """Body of a reward thread: it is free again before its caller hears, so that the next call finds it."""
    while True:
        tell = inbox.get()()
        _idle_threads.append(inbox)
        tell()


class _Gate:
    """A semaphore per event loop, so that one reward function serves several `asyncio.run` calls."""

    def __init__(self) -> None:
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_PARALLEL))


def _check_score(result: Any, sample: Sample, name: str) -> float | dict[str, float]:
    values = list(result.values()) if isinstance(result, dict) else [result]
    if not values or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
        raise SlimeError(
            f"reward {name} returned {result!r} for {_who(sample)}",
            "return a finite number, or a dict of named finite numbers",
        )
    return {k: float(v) for k, v in result.items()} if isinstance(result, dict) else float(result)


def _check_group(result: Any, group: list[Sample], name: str) -> list[float | dict[str, float]]:
    if not isinstance(result, (list, tuple)) or len(result) != len(group):
        got = f"{len(result)} scores" if isinstance(result, (list, tuple)) else repr(result)
        raise SlimeError(f"reward {name} returned {got} for {len(group)} samples", "return one score per sample")
    return [_check_score(r, s, name) for r, s in zip(result, group, strict=True)]


def _who(subject: Any) -> str:
    if isinstance(subject, list):
        return f"a group of {len(subject)} (group {subject[0].group_index if subject else '-'})"
    return f"sample {subject.index}"
