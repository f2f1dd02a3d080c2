"""Ranking the answers of a group by meetings of two."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

from slimecli.data_tools.hooks import load_hook
from slimecli.data_tools.rewards.judge import JudgeReward
from slimecli.errors import SlimeError, UsageError
from slimecli.recipe_reward import RewardSection
from slimecli.seeds import derive_seed
from slimecli.types import Sample

Compare = Callable[[Any, Sample, Sample], Awaitable[float]]


class TournamentReward:
    """Rank within the group, 0..1: share of meetings won (round_robin) or of rounds survived (single_elimination)."""

    parallel = 16
    group = True

    def __init__(self, section: RewardSection) -> None:
        if not section.group:
            raise UsageError("reward.type = tournament ranks whole groups", "--set reward.group=true")
        settings = section.tournament
        self._schedule = settings.schedule
        self._both_orders = settings.both_orders
        self._name = settings.compare
        if settings.compare == "judge":
            self._compare: Callable[..., Any] = JudgeReward(section).compare
        else:
            self._compare = load_hook(settings.compare, ("args", "first", "second"))

    async def __call__(self, args: Any, samples: list[Sample]) -> list[float]:
        """[len(samples)] scores; a group of one has nobody to meet and gets 0.5."""
        if len(samples) == 1:
            return [0.5]
        recipe = getattr(args, "recipe", None)
        seed = getattr(recipe, "seed", 0)
        chance = random.Random(derive_seed(seed, "tournament", samples[0].group_index or 0))
        if self._schedule == "round_robin":
            return await self._round_robin(args, samples)
        return await self._single_elimination(args, samples, chance)

    async def _round_robin(self, args: Any, samples: list[Sample]) -> list[float]:
        n = len(samples)
        pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
        results = await asyncio.gather(*(self._meet(args, samples[a], samples[b]) for a, b in pairs))
        points = [0.0] * n
        for (a, b), won in zip(pairs, results, strict=True):
            points[a] += won
            points[b] += 1 - won
        return [p / (n - 1) for p in points]

    async def _single_elimination(self, args: Any, samples: list[Sample], chance: random.Random) -> list[float]:
        alive = list(range(len(samples)))
        chance.shuffle(alive)
        rounds = math.ceil(math.log2(len(samples)))
        scores = [1.0] * len(samples)
        for number in range(rounds):
            pairs = list(zip(alive[::2], alive[1::2], strict=False))
            coins = [chance.random() < 0.5 for _ in pairs]
            results = await asyncio.gather(*(self._meet(args, samples[a], samples[b]) for a, b in pairs))
            through = []
            for (a, b), won, coin in zip(pairs, results, coins, strict=True):
                first_wins = coin if won == 0.5 else won > 0.5
                through.append(a if first_wins else b)
                scores[b if first_wins else a] = number / rounds
            # the odd one out goes through, and to the front: it does not sit out twice in a row
            alive = ([alive[-1]] if len(alive) % 2 else []) + through
        return scores

    async def _meet(self, args: Any, first: Sample, second: Sample) -> float:
        won = await self._once(args, first, second)
        return (won + 1 - await self._once(args, second, first)) / 2 if self._both_orders else won

    async def _once(self, args: Any, first: Sample, second: Sample) -> float:
        result = self._compare(args, first, second)
        won = await result if inspect.isawaitable(result) else result
        if isinstance(won, bool) or not isinstance(won, (int, float)) or not 0 <= won <= 1:
            raise SlimeError(f"the comparison {self._name} returned {won!r}", "return 1.0, 0.0 or 0.5")
        return float(won)
