"""Several engines as one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from slimecli.engines.router.policies import rendezvous
from slimecli.engines.streaming import Answers, Tell, stream_of
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine, WeightUpdate
from slimecli.types import WeightReceipt

Ask = Callable[[RolloutEngine], Coroutine[Any, Any, Any]]
"""a request to whichever engine it is given to"""


class EnginePool:
    """Routes requests; control calls go to every engine.

    A list of different prompts is cut into contiguous parts, one per engine. A single request, or a list that is one
    prompt over and over (a group: its prompt is computed once where it stays together), goes to the engine with the
    fewest answers in flight, or by `routing_key` always to the same one; a router behind it is told the key as well.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise SlimeError("a pool needs at least one engine", "set engine.replicas or engine.urls")
        self.engines = list(engines)
        self._load = [0] * len(self.engines)

    def _name(self, index: int) -> str:
        url = getattr(self.engines[index], "url", None)
        return f"engine {index} at {url}" if url else f"engine {index}"

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """Route, or split and join."""
        payload = dict(payload)
        key = payload.get("routing_key")
        count = _length(payload)
        if count is None or key is not None or len(self.engines) == 1 or _is_group(payload):
            return await self._ask(self._pick(key), lambda e: e.generate(payload), count or 1)
        parts = _cut(payload, count, self._shares(count))
        answers = await asyncio.gather(
            *(self._ask(index, functools.partial(_generate, part), size) for index, part, size in parts),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [reply for answer in answers if isinstance(answer, list) for reply in answer]

    async def generate_stream(self, payload: Mapping[str, Any], tell: Tell) -> None:
        """Answers of one engine, told as they come; of several where one is lost under them."""
        payload = dict(payload)
        key = payload.get("routing_key")
        answers = Answers(payload, tell)
        await self._ask(self._pick(key), lambda e: answers.ask(stream_of(e)), len(payload["input_ids"]))

    def _usable(self) -> list[int]:
        """Numbers of the engines that can be asked."""
        return list(range(len(self.engines)))

    def _living(self) -> list[int]:
        """Numbers of the engines that control calls go to."""
        return list(range(len(self.engines)))

    def _pick(self, key: Any) -> int:
        usable = self._usable()
        if key is not None:
            return usable[rendezvous(str(key), [str(i) for i in usable])]
        return min(usable, key=lambda i: self._load[i])

    def _shares(self, count: int) -> list[int]:
        """Answers per engine: as even as possible, the idlest engines first."""
        order = sorted(self._usable(), key=lambda i: self._load[i])
        size, rest = divmod(count, len(order))
        shares = [0] * len(self.engines)
        for place, index in enumerate(order):
            shares[index] = size + (place < rest)
        return shares

    async def _ask(self, index: int, ask: Ask, count: int) -> Any:
        self._load[index] += count
        try:
            return await self._call(index, ask)
        finally:
            self._load[index] -= count

    async def _call(self, index: int, ask: Ask) -> Any:
        """One engine's answer, or its error with its name."""
        try:
            return await ask(self.engines[index])
        except SlimeError as error:
            url = getattr(self.engines[index], "url", "")
            if len(self.engines) == 1 or (url and url in error.what):
                raise
            raise type(error)(f"{self._name(index)}: {error.what}", error.fix) from error

    async def _all(self, act: Callable[[RolloutEngine], Awaitable[Any]], doing: str) -> list[Any]:
        """Every living engine; all are awaited before the first failure is raised."""
        living = self._living()
        answers = await asyncio.gather(*(act(self.engines[i]) for i in living), return_exceptions=True)
        wrong = [(i, a) for i, a in zip(living, answers, strict=True) if isinstance(a, BaseException)]
        for _, error in wrong:
            if not isinstance(error, SlimeError):
                raise error
        wrong = [(i, a) for i, a in wrong if not self._excuses(i, a)]
        if wrong:
            told = "; ".join(f"{self._name(i)}: {getattr(e, 'what', e)}" for i, e in wrong)
            raise SlimeError(f"{doing} failed on {len(wrong)} of {len(living)} engines: {told}", "see their logs")
        return [a for a in answers if not isinstance(a, BaseException)]

    def _excuses(self, index: int, error: BaseException) -> bool:
        """Whether an engine's failure in a control call is dealt with."""
        return False

    async def update_all(self, update: WeightUpdate) -> list[WeightReceipt]:
        """Update every engine; one receipt each."""
        return await self._all(lambda e: e.update_weights(update), f"the weight update to version {update.version}")

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Update every engine; raises when they do not end up with the same weights."""
        receipts = await self.update_all(update)
        if len({(r.version, r.fingerprint) for r in receipts}) > 1:
            held = ", ".join(f"{self._name(i)}: {r.version}/{r.fingerprint}" for i, r in enumerate(receipts))
            raise SlimeError(f"the engines hold different weights: {held}", "restart the engines")
        return receipts[0]

    async def abort(self, rid: str | None = None) -> None:
        """On every engine."""
        await self._all(lambda e: e.abort(rid), "abort")

    async def sleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Every engine."""
        await self._all(lambda e: e.sleep(tags), "sleep")

    async def wake(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Every engine."""
        await self._all(lambda e: e.wake(tags), "wake")

    async def close(self) -> None:
        """Every engine. Idempotent."""
        await self._all(lambda e: e.close(), "close")


async def _generate(payload: Mapping[str, Any], engine: RolloutEngine) -> Any:
    return await engine.generate(payload)


def _length(payload: Mapping[str, Any]) -> int | None:
    """Prompts of a list payload; None for a single one."""
    ids, text = payload.get("input_ids"), payload.get("text")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return len(text) if isinstance(text, list) else None


def _is_group(payload: Mapping[str, Any]) -> bool:
    """True for a list payload whose prompts are all the same."""
    prompts = payload.get("input_ids") or payload.get("text") or []
    return all(prompt == prompts[0] for prompt in prompts)


def _cut(payload: Mapping[str, Any], count: int, shares: list[int]) -> list[tuple[int, dict[str, Any], int]]:
    """(engine, part of the payload, prompts in it), contiguous and in order."""
    parts, start = [], 0
    for index, size in enumerate(shares):
        if size:
            end = start + size
            part = {k: v[start:end] if isinstance(v, list) and len(v) == count else v for k, v in payload.items()}
            parts.append((index, part, size))
            start = end
    return parts
