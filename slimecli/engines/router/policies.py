"""Which engine gets a request. A policy sees living workers only, and never none."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PIECE_CHARS, PIECE_IDS = 256, 64
"""length of the pieces in which prompts are compared (characters of a text, tokens of a list)"""
MAX_PIECES = 64
"""pieces of a prompt that are looked at: what comes later does not change where it goes"""


class Place(Protocol):
    """What a policy knows of an engine."""

    url: str
    load: int
    """requests in flight"""


@dataclass(frozen=True)
class Ask:
    """What a policy knows of a request."""

    key: str = ""
    """session, or routing key: one key, one engine"""
    prompt: Any = None
    """text, token ids, or chat messages as text"""


class Policy(Protocol):
    """Chooses."""

    def pick(self, ask: Ask, places: Sequence[Place]) -> Place:
        """One of `places`, which are at least one."""


def rendezvous(key: str, names: Sequence[str]) -> int:
    """Index of the name that a key belongs to. When a name leaves, only its own keys move."""

    def rank(index: int) -> bytes:
        # a key is a header, which may hold any bytes: aiohttp hands on those that are no text as surrogates
        both = f"{key}\0{names[index]}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(both, digest_size=8).digest()

    return max(range(len(names)), key=rank)


class RoundRobin:
    """In turns."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, ask: Ask, places: Sequence[Place]) -> Place:
        """The next one."""
        self._turn += 1
        return places[self._turn % len(places)]


class LeastLoad:
    """Where the fewest requests are in flight; among equals, where the fewest have gone so far."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def pick(self, ask: Ask, places: Sequence[Place]) -> Place:
        """The idlest one."""
        place = min(places, key=lambda p: (p.load, self._given[p.url]))
        self._given[place.url] += 1
        return place


class ConsistentHashing(LeastLoad):
    """Requests of one key to one engine; those without a key where the least is to do."""

    def pick(self, ask: Ask, places: Sequence[Place]) -> Place:
        """The key's engine."""
        if not ask.key:
            return super().pick(ask, places)
        return places[rendezvous(ask.key, [p.url for p in places])]


class CacheAware(ConsistentHashing):
    """A prompt goes where one that began like it went, since its keys and values may still be there.

    Not, however, to an engine that has much more to do than the idlest one. Memory is bounded: of the beginnings that
    were seen, those longest out of use are forgotten.

    Args:
        threshold: share of a prompt's pieces that must be known for it to count as begun alike.
        abs_threshold: requests by which an engine may be ahead of the idlest one, and
        rel_threshold: how many times more than the idlest one's it may have; beyond both it is overloaded.
        entries: pieces remembered.
    """

    def __init__(
        self,
        threshold: float = 0.3,
        abs_threshold: int = 64,
        rel_threshold: float = 1.5,
        entries: int = 1 << 16,
    ) -> None:
        super().__init__()
        self._threshold = threshold
        self._abs, self._rel = abs_threshold, rel_threshold
        self._entries = entries
        self._seen: OrderedDict[int, str] = OrderedDict()

    def pick(self, ask: Ask, places: Sequence[Place]) -> Place:
        """The key's engine, or that of the longest known beginning."""
        marks = _marks(ask.prompt)
        if ask.key or not marks:
            return super().pick(ask, places)
        by_url = {p.url: p for p in places}
        found, depth = None, 0
        for number, mark in enumerate(marks, 1):
            url = self._seen.get(mark)
            if url is None:
                break
            if url in by_url:
                found, depth = by_url[url], number
        if found is None or depth < self._threshold * len(marks) or self._is_overloaded(found, places):
            found = super().pick(ask, places)
        self._remember(marks, found.url)
        return found

    def _is_overloaded(self, place: Place, places: Sequence[Place]) -> bool:
        least = min(p.load for p in places)
        return place.load - least > self._abs and place.load > self._rel * least

    def _remember(self, marks: list[int], url: str) -> None:
        for mark in marks:
            self._seen[mark] = url
            self._seen.move_to_end(mark)
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)


def _marks(prompt: Any) -> list[int]:
    """One number for each beginning of a prompt, piece by piece."""
    size = PIECE_CHARS if isinstance(prompt, str) else PIECE_IDS
    if not isinstance(prompt, str | list) or not prompt:
        return []
    marks, mark = [], 0
    for start in range(0, min(len(prompt), size * MAX_PIECES), size):
        piece = prompt[start : start + size]
        mark = hash((mark, piece if isinstance(piece, str) else str(piece)))
        marks.append(mark)
    return marks


POLICIES = {
    "cache_aware": "slimecli.engines.router.policies:CacheAware",
    "consistent_hashing": "slimecli.engines.router.policies:ConsistentHashing",
    "least_load": "slimecli.engines.router.policies:LeastLoad",
    "round_robin": "slimecli.engines.router.policies:RoundRobin",
}
"""smg's names for them"""
