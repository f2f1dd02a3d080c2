"""Calling a plugin's functions: samples with slime's surface go in, results that slimecli can use come out."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from numbers import Real
from typing import Any

from slimecli import types
from slimecli.rollout.args import HookArgs
from slimecli.shim.sample import adopted
from slimecli.types import SampleStatus

_LISTS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
"""fields that a plugin may have made as arrays or tensors"""

calling: ContextVar[HookArgs | None] = ContextVar("slime_plugin_args", default=None)
"""args of the hook that runs; slime's helpers that take none, such as `post`, look here"""


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called as slime calls it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            given = _enter(args)
            return _usable(await function(*given, **kwargs), given)

        return call_async
    if inspect.isclass(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _enter(args)
        result = function(*given, **kwargs)
        return _later(result, given) if inspect.isawaitable(result) else _usable(result, given)

    return call


async def _later(result: Any, given: list[Any]) -> Any:
    return _usable(await result, given)


def _enter(args: tuple[Any, ...]) -> list[Any]:
    """The arguments as a plugin expects them: a namespace that it may write to, samples of its kind."""
    given = [value.for_plugins() if isinstance(value, HookArgs) else _adopt(value) for value in args]
    if given and isinstance(given[0], HookArgs):
        calling.set(given[0])
    return given


def _adopt(value: Any) -> Any:
    if isinstance(value, types.Sample):
        return adopted(value)
    if isinstance(value, list):
        for item in value:
            _adopt(item)
    return value


def _usable(result: Any, given: list[Any]) -> Any:
    """Rewards with their numbers only; samples that say how they ended."""
    if isinstance(result, types.Sample):
        return _ended(result)
    subject = given[1] if len(given) > 1 else None
    if getattr(result, "shape", None) == ():  # a number or truth value of NumPy or torch
        return result.item()
    if isinstance(result, list):
        each = subject if isinstance(subject, list) and len(subject) == len(result) else [None] * len(result)
        result[:] = [_usable(item, [None, one]) for item, one in zip(result, each, strict=True)]  # the same list
        return result
    return _numbers(result, subject) if isinstance(result, dict) and isinstance(subject, types.Sample) else result


def _ended(sample: types.Sample) -> types.Sample:
    """slime trains on a sample that was left pending; here it says that it is complete."""
    if sample.status is SampleStatus.PENDING and sample.response_length:
        sample.status = SampleStatus.COMPLETED
    if isinstance(sample.reward, dict):
        sample.reward = _numbers(sample.reward, sample)
    elif isinstance(sample.reward, Real):
        sample.reward = float(sample.reward)
    sample.metadata = _as_json(sample.metadata)
    for name in _LISTS:
        value = getattr(sample, name)
        if hasattr(value, "tolist"):
            setattr(sample, name, value.tolist())
    return sample


def _as_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Samples are recorded as JSON; a plugin may note anything."""
    try:
        json.dumps(metadata)
    except (TypeError, ValueError):
        plain: dict[str, Any] = json.loads(json.dumps(metadata, default=_plain, skipkeys=True))
        return plain
    return metadata


def _plain(value: Any) -> Any:
    """Arrays, tensors and their numbers as Python's; sets as lists; the rest as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _numbers(reward: dict[str, Any], subject: Any) -> dict[str, float]:
    """Named scores that are numbers; the rest, such as the answer that was found, goes into the sample's metadata."""
    numbers = {k: float(v) for k, v in reward.items() if isinstance(v, Real)}
    rest = {k: v for k, v in reward.items() if k not in numbers}
    if rest and isinstance(subject, types.Sample):
        subject.metadata = {**subject.metadata, "reward_info": rest}
    return numbers
