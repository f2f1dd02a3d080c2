"""A weighted sum of several scorers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from slimecli.errors import SlimeError, UsageError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample

if TYPE_CHECKING:
    from slimecli.data_tools.rewards import Reward


class MixReward:
    """The weighted sum of the scorers in reward.mix, as `score`, beside each of them under its own name."""

    parallel = 64

    def __init__(self, section: RewardSection) -> None:
        from slimecli.data_tools.rewards import load_reward

        if not section.mix:
            raise UsageError("reward.type = mix needs its parts", "--set 'reward.mix={math = 0.8, format = 0.2}'")
        if "mix" in section.mix or "score" in section.mix:
            raise UsageError("reward.mix cannot hold `mix` or `score`", "name scorers or functions")
        self._weights = dict(section.mix)
        self._parts: dict[str, Reward] = {}
        for name in self._weights:
            which = {"path": name} if ":" in name else {"path": "", "type": name}
            self._parts[name] = load_reward(section.model_copy(update=which | {"mix": {}}), fixed=True)
        self.group = any(part.group for part in self._parts.values())

    async def __call__(self, args: Any, subject: Sample | list[Sample]) -> Any:
        """Named scores of a sample, or of each sample of a group."""
        samples = subject if isinstance(subject, list) else [subject]
        columns = await asyncio.gather(*(self._column(part, args, samples) for part in self._parts.values()))
        rows = [self._row([column[i] for column in columns]) for i in range(len(samples))]
        return rows if isinstance(subject, list) else rows[0]

    async def _column(self, part: Reward, args: Any, samples: list[Sample]) -> list[Any]:
        if part.group:
            return list(await part(args, samples))
        outcomes = await part.each(args, samples)
        for outcome in outcomes:
            if isinstance(outcome, SlimeError):
                raise outcome
        return outcomes

    def _row(self, scores: list[Any]) -> dict[str, float]:
        row = {}
        for name, score in zip(self._parts, scores, strict=True):
            if isinstance(score, dict) and "score" not in score:
                raise SlimeError(
                    f"{name} gave {sorted(score)} and no `score` to weigh", "return a number, or a `score`"
                )
            row[name] = score["score"] if isinstance(score, dict) else score
        return {"score": sum(self._weights[name] * value for name, value in row.items()), **row}
