"""What collectors are made of, over an engine of fakes.py."""

from __future__ import annotations

from typing import Any

from slimecli.recipe import Recipe, load_recipe
from slimecli.rollout.answering import Answering
from slimecli.rollout.args import HookArgs
from slimecli.rollout.collect import RolloutCollector
from slimecli.rollout.generate import Generator
from slimecli.rollout.source import PromptSource
from slimecli.types import Sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Differs within a group."""
    return float((sample.index or 0) % 2)


def pieces(engine: Any, *sets: str, keep: Any = None) -> tuple[Recipe, PromptSource, Answering]:
    """Batches of 4 groups of 2 over 32 prompts of one token, in file order."""
    recipe = load_recipe("", ("rollout.batch_size=4", "rollout.n_samples_per_prompt=2", *sets))
    source = PromptSource([Sample(prompt=f"p{i}", tokens=[i]) for i in range(32)], 2, seed=recipe.seed, shuffle=False)
    generator = Generator(engine=engine, reward=reward, args=HookArgs(recipe), timeout_s=5.0)
    return recipe, source, Answering(recipe, generator, [2], keep)


def collector(engine: Any, *sets: str, keep: Any = None) -> tuple[RolloutCollector, PromptSource]:
    """A RolloutCollector over them."""
    recipe, source, answering = pieces(engine, *sets, keep=keep)
    return RolloutCollector(recipe, source, answering), source


def numbers(groups: list[list[Sample]]) -> list[int | None]:
    """Group numbers of a batch."""
    return [g[0].group_index for g in groups]
