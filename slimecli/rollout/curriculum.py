"""Adaptive difficulty: prompts come from several levels, the more from a level the more its answers can teach.

A group teaches by the differences of its rewards. At success rate p their variance is p (1 - p), so that is a level's
weight: what is always or never solved gives way to what is sometimes solved, as the policy gets better. The rate is a
running mean over the groups of the level, filtered ones included; a level that was not tried yet counts as p = 1/2. No
level goes below `floor`, so that forgetting and late progress are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimecli.errors import DataError
from slimecli.recipe_sections import CurriculumSection
from slimecli.rollout.source import BufferFilter, PromptSource
from slimecli.types import Group, Sample, SampleStatus

UNKNOWN = 0.5
"""success rate of a level that was not tried yet"""


class CurriculumSource(PromptSource):
    """A walk over the rows of each level, and a choice of the level by what the policy can do.

    Args:
        levels: [rows] level of each row, by name.
        section: how fast the success rate follows, and the least weight.
        reward_key: which of named scores counts.
    """

    def __init__(
        self,
        rows: Sequence[Sample],
        n_samples: int,
        *,
        seed: int,
        shuffle: bool,
        levels: Sequence[str],
        section: CurriculumSection,
        reward_key: str | None = None,
        pick: BufferFilter | None = None,
    ) -> None:
        if "" in levels:
            name = section.key or LEVEL
            raise DataError(
                f"row {list(levels).index('') + 1} of the training data has no metadata.{name}",
                "every row needs a level: set data.curriculum.key to the key that holds it, or prepare the data again",
            )
        mix = dict.fromkeys(levels, 1.0)
        super().__init__(rows, n_samples, seed=seed, shuffle=shuffle, mix=mix, sources=levels, pick=pick)
        self._section = section
        self._reward_key = reward_key
        self._success: dict[str, float] = {}
        """level -> running success rate; a level that was not tried yet is not in it"""

    def feedback(self, groups: list[Group]) -> None:
        """What became of groups that were handed out; changes which levels come next."""
        for group in groups:
            scores = [
                min(max(s.get_reward_value(self._reward_key), 0.0), 1.0)
                for s in group
                if s.status is not SampleStatus.FAILED and s.reward is not None
            ]
            if not scores:
                continue
            level = level_of(group[0], self._section)
            mean, old = sum(scores) / len(scores), self._success.get(level, UNKNOWN)
            self._success[level] = old + self._section.rate * (mean - old)
        self._weigh()

    def _weigh(self) -> None:
        for level in self._mix:
            rate = self._success.get(level, UNKNOWN)
            self._mix[level] = max(4 * rate * (1 - rate), self._section.floor)

    def metrics(self) -> dict[str, float]:
        """Share of the next prompts and success rate, level by level."""
        total = sum(self._mix.values())
        shares = {f"rollout/level/{level}/share": weight / total for level, weight in self._mix.items()}
        return shares | {f"rollout/level/{level}/success": rate for level, rate in sorted(self._success.items())}

    def state(self) -> dict[str, Any]:
        """That of the walks, and the success rates."""
        return {**super().state(), "success": dict(sorted(self._success.items()))}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        super().restore(state)
        self._success = dict(state.get("success", {}))
        self._weigh()


def level_of(sample: Sample, section: CurriculumSection) -> str:
    """The level of a row by its metadata."""
    return str(sample.metadata.get(section.key or LEVEL, ""))


LEVEL = "level"
"""key of metadata under which prepare-data writes the level of a generated row"""
