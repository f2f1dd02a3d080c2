"""Scores for answers. REWARDS: name -> scorer, each in its own file; own ones by path.

Whatever goes wrong while scoring is a SlimeError that names the scorer and the sample: a failed score is counted by the
rollout, it never becomes a zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

from slimecli.data_tools.hooks import load_hook
from slimecli.data_tools.rewards.extract import extract_boxed
from slimecli.data_tools.rewards.threads import Gate, in_thread
from slimecli.errors import DataError, SlimeError, UsageError
from slimecli.lookup import look_up
from slimecli.recipe_reward import RewardSection
from slimecli.types import LAST_TURN, Sample

REWARDS: dict[str, str] = {
    "reasoning_gym": "slimecli.data_tools.rewards.reasoning_gym:score",
    "exact": "slimecli.data_tools.rewards.text:exact",
    "regex": "slimecli.data_tools.rewards.text:regex",
    "f1": "slimecli.data_tools.rewards.text:f1",
    "em": "slimecli.data_tools.rewards.text:em",
    "tool_calls": "slimecli.data_tools.rewards.tool_calls:score",
    "format": "slimecli.data_tools.rewards.answers:form",
    "math": "slimecli.data_tools.rewards.mathematics:score",
    "math_verify": "slimecli.data_tools.rewards.math_verify:score",
    "deepscaler": "slimecli.data_tools.rewards.answers:deepscaler",
    "dapo": "slimecli.data_tools.rewards.answers:dapo",
    "gpqa": "slimecli.data_tools.rewards.answers:gpqa",
    "ifbench": "slimecli.data_tools.rewards.ifbench:score",
    "code": "slimecli.data_tools.rewards.code:CodeReward",
    "remote_rm": "slimecli.data_tools.rewards.remote:RemoteReward",
    "judge": "slimecli.data_tools.rewards.judge:JudgeReward",
    "tournament": "slimecli.data_tools.rewards.tournament:TournamentReward",
    "mix": "slimecli.data_tools.rewards.mix:MixReward",
}
"""rm_type -> a quick function (response, label, metadata) -> score, or a class that is made with the recipe's reward
section and called with (args, sample), with (args, samples) where its `group` is true. `boxed_NAME` scores the last
\\boxed{} of the response."""

MAX_PARALLEL = 8
"""scores of own functions computed at the same time; the deadline of one starts when its turn comes"""

Scorer = Callable[[str, str | None, dict[str, Any]], float | dict[str, float]]


class RewardTimeout(SlimeError):
    """A scorer did not answer in time."""


@cache
def load_scorer(name: str) -> Any:
    """The built-in scorer of that name: a function, or a class of scorers."""
    base = name.removeprefix("boxed_")
    scorer = look_up(
        REWARDS, base, "reward type", "types: {known}, each also as boxed_NAME; or reward.path = file.py:function"
    )
    if base == name or inspect.isclass(scorer):
        return scorer
    return lambda response, label, metadata: scorer(extract_boxed(response) or "", label, metadata)


def load_reward(section: RewardSection, *, fixed: bool = False) -> Reward:
    """The reward function of a recipe: async (args, sample, **kw) -> float or named floats.

    With `section.group` it takes a list of samples and returns as many scores. Loading checks name, settings and
    signature; calling enforces `timeout_s` (RewardTimeout) and wraps what the scorer raises.

    Args:
        fixed: a row's metadata.rm_type does not replace the scorer.
    """
    if section.path:
        hook = load_hook(section.path, ("args", "samples" if section.group else "sample"))
        return Own(hook, section.path, section)
    return BuiltIn(section, fixed=fixed)


class Reward(ABC):
    """A loaded reward function: called with a sample, or with a group where it scores groups."""

    group: bool
    """needs the whole group at once"""

    def __init__(self, name: str, section: RewardSection) -> None:
        self._name = name
        self._timeout_s = section.timeout_s

    @abstractmethod
    async def __call__(self, args: Any, subject: Any, **kwargs: Any) -> Any:
        """The score, or with a list the scores."""

    async def each(self, args: Any, samples: list[Sample]) -> list[Any]:
        """A score, or the SlimeError instead of it, per sample. They run, fail and time out one by one."""
        return list(await asyncio.gather(*(self._outcome(args, s) for s in samples)))

    async def _outcome(self, args: Any, sample: Sample) -> Any:
        try:
            return await self(args, sample)
        except SlimeError as error:
            return error

    async def _timed(self, gate: Gate, call: Callable[[], Any], name: str, subject: Any) -> Any:
        """The checked result of a call that gives a score, or an awaitable of one."""
        try:
            async with gate.here(), asyncio.timeout(self._timeout_s) as deadline:
                result = call()
                result = await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not deadline.expired():
                raise _wrap(error, name, subject) from error
            raise _too_late(name, self._timeout_s, subject) from None
        except SlimeError as error:
            raise _told(error, name, subject) from error
        except Exception as error:  # a user's function may raise anything; it goes on as a SlimeError with its cause
            raise _wrap(error, name, subject) from error
        return _check_group(result, subject, name) if isinstance(subject, list) else _check_score(result, subject, name)


class Own(Reward):
    """A user's function; one that is not async runs in a thread."""

    def __init__(self, hook: Callable[..., Any], name: str, section: RewardSection) -> None:
        super().__init__(name, section)
        self.group = section.group
        self._hook = hook
        self._gate = Gate(MAX_PARALLEL)

    async def __call__(self, args: Any, subject: Any, **kwargs: Any) -> Any:
        """The score, or with a list the scores."""
        return await self._timed(self._gate, lambda: self._call(args, subject, kwargs), self._name, subject)

    async def _call(self, args: Any, subject: Any, kwargs: dict[str, Any]) -> Any:
        if _is_async(self._hook):
            return await self._hook(args, subject, **kwargs)
        result = await in_thread(lambda: self._hook(args, subject, **kwargs))
        return await result if inspect.isawaitable(result) else result


class BuiltIn(Reward):
    """A scorer of the registry, which a row may replace by naming another as metadata.rm_type."""

    def __init__(self, section: RewardSection, *, fixed: bool) -> None:
        super().__init__(section.type, section)
        self._section = section
        self._fixed = fixed
        self._made: dict[str, Any] = {}
        self._gates: dict[str, Gate] = {}
        self.group = bool(getattr(self._scorer(section.type), "group", False))

    async def __call__(self, args: Any, subject: Any, **kwargs: Any) -> Any:
        """The score, or with a list the scores."""
        if isinstance(subject, list) and self.group:
            scorer = self._scorer(self._name)
            subject = [_as_answered(s) for s in subject]
            return await self._timed(self._gates[self._name], lambda: scorer(args, subject), self._name, subject)
        outcomes = await self.each(args, subject if isinstance(subject, list) else [subject])
        for outcome in outcomes:
            if isinstance(outcome, SlimeError):
                raise outcome
        return outcomes if isinstance(subject, list) else outcomes[0]

    async def each(self, args: Any, samples: list[Sample]) -> list[Any]:
        """A score, or the SlimeError instead of it, per sample.

        Quick scorers share one thread and one deadline for all samples; of those that run out of it, the ones that are
        done count. The others (code, servers) run one by one.
        """
        samples = [_as_answered(s) for s in samples]
        outcomes: list[Any] = [None] * len(samples)
        quick: list[tuple[int, Scorer]] = []
        slow = []
        for place, sample in enumerate(samples):
            try:
                scorer = self._scorer(self._kind(sample))
            except SlimeError as error:
                outcomes[place] = _told(error, self._kind(sample), sample)
                continue
            if inspect.isfunction(scorer):
                quick.append((place, scorer))
            else:
                slow.append((place, self._one(args, sample, scorer)))

        async def keep(place: int, coming: Any) -> None:
            outcomes[place] = await coming

        tasks = [keep(place, coming) for place, coming in slow]
        if quick:
            tasks.append(self._quick(quick, samples, outcomes))
        await asyncio.gather(*tasks)
        return outcomes

    async def _quick(self, todo: list[tuple[int, Scorer]], samples: list[Sample], outcomes: list[Any]) -> None:
        done: dict[int, Any] = {}

        def work() -> None:
            for place, scorer in todo:
                done[place] = self._outcome_here(scorer, samples[place])

        try:
            async with self._gates.setdefault("", Gate(MAX_PARALLEL)).here(), asyncio.timeout(self._timeout_s):
                await in_thread(work)
        except TimeoutError:
            pass
        finished = dict(done)  # the thread may still be at work
        for place, _ in todo:
            late = _too_late(self._name, self._timeout_s, samples[place])
            outcomes[place] = finished.get(place, late)

    def _outcome_here(self, scorer: Scorer, sample: Sample) -> Any:
        name = self._kind(sample)
        try:
            return _check_score(scorer(sample.response, sample.label, sample.metadata), sample, name)
        except SlimeError as error:
            return _told(error, name, sample)
        except Exception as error:  # data may break a scorer in any way; it goes on as a SlimeError with its cause
            return _wrap(error, name, sample)

    async def _one(self, args: Any, sample: Sample, scorer: Any) -> Any:
        name = self._kind(sample)
        if name.startswith("boxed_"):
            sample = dataclasses.replace(sample, response=extract_boxed(sample.response) or "")
        try:
            if getattr(scorer, "group", False):
                raise UsageError(f"{name} ranks whole groups", "--set reward.group=true, and one scorer for all rows")
            return await self._timed(self._gates[name], lambda: scorer(args, sample), name, sample)
        except SlimeError as error:
            return error

    def _kind(self, sample: Sample) -> str:
        return str((not self._fixed and sample.metadata.get("rm_type")) or self._name)

    def _scorer(self, name: str) -> Any:
        """A function, or an object made once with the recipe's settings."""
        if name not in self._made:
            scorer = load_scorer(name)
            is_class = inspect.isclass(scorer)
            self._made[name] = scorer(self._section) if is_class else scorer
            self._gates[name] = Gate(getattr(scorer, "parallel", MAX_PARALLEL))
        return self._made[name]


def _as_answered(sample: Sample) -> Sample:
    """The sample with its last turn as the response: what a tool said is no answer of the model's."""
    said = sample.metadata.get(LAST_TURN)
    return sample if said is None else dataclasses.replace(sample, response=str(said))


def _too_late(name: str, timeout_s: float, subject: Any) -> RewardTimeout:
    return RewardTimeout(
        f"reward {name} took longer than {timeout_s:g} s for {_who(subject)}",
        "make it faster, or raise reward.timeout_s",
    )


def _told(error: SlimeError, name: str, subject: Any) -> SlimeError:
    kind = next((k for k in (DataError, UsageError, RewardTimeout) if isinstance(error, k)), SlimeError)
    return kind(f"reward {name} for {_who(subject)}: {error.what}", error.fix)


def _wrap(error: Exception, name: str, subject: Any) -> SlimeError:
    return SlimeError(
        f"reward {name} raised {type(error).__name__} for {_who(subject)}: {error}",
        "mend the reward function; `slime reward check DATA` tries it without a model",
    )


def _is_async(hook: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


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
