"""What overlap and partial rollout save: slime's own collectors, with an engine and a trainer that sleep.

python -m benchmarks.overlap [--save]

Nothing is computed, so that the figures hardly depend on this machine: an answer takes its length in ticks, lengths
have a long tail (log-normal, sigma 0.8), an optimizer step takes as long as an average answer. What is measured is how
long the trainer waits, and how old the answers are.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import _common
from slimecli.recipe import Recipe, load_recipe
from slimecli.rollout.ahead import AheadCollector
from slimecli.rollout.answering import Answering
from slimecli.rollout.args import HookArgs
from slimecli.rollout.collect import Collection, RolloutCollector
from slimecli.rollout.continuous import ContinuousCollector
from slimecli.rollout.generate import Generator
from slimecli.rollout.source import PromptSource
from slimecli.types import Sample

SIDES: dict[str, tuple[str, ...]] = {
    "in turns": (),
    "partial": ("rollout.partial=true", "rollout.over_sampling_batch_size=24"),
    "1 ahead": ("rollout.max_staleness=1",),
    "2 ahead": ("rollout.max_staleness=2",),
    "1 ahead, partial": ("rollout.max_staleness=1", "rollout.partial=true", "rollout.over_sampling_batch_size=24"),
    "never stopping, 1": ("rollout.max_staleness=1", "rollout.fully_async=true"),
    "never stopping, 2": ("rollout.max_staleness=2", "rollout.fully_async=true"),
}
SLOTS = 16
"""groups that the engine answers at the same time; a batch has as many"""
TICKS = 20
"""median length of an answer"""


class SleepingEngine:
    """Says one token per tick; an abort ends what runs."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.version = 0
        self._stopped = asyncio.Event()

    async def generate(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answers whose lengths follow from the prompt."""
        prompts = payload["input_ids"]
        left = max(length_of(ids[0]) - (len(ids) - 1) for ids in prompts)
        begin, stopped = time.perf_counter(), self._stopped
        waiting = asyncio.ensure_future(stopped.wait())
        await asyncio.wait([waiting], timeout=left * self.tick_s)
        waiting.cancel()
        said = min(left, int((time.perf_counter() - begin) / self.tick_s))
        return [self._reply(ids, said) for ids in prompts]

    def _reply(self, ids: list[int], said: int) -> dict[str, Any]:
        left = length_of(ids[0]) - (len(ids) - 1)
        count = min(said, left)
        meta = {
            "finish_reason": {"type": "stop" if count == left else "abort"},
            "output_token_logprobs": [[-0.5, 7, None]] * count,
            "weight_version": str(self.version),
        }
        return {"text": "", "output_ids": [7] * count, "meta_info": meta}

    async def abort(self, rid: str | None = None) -> None:
        """End what runs."""
        self._stopped.set()
        self._stopped = asyncio.Event()


def length_of(prompt: int) -> int:
    """Tokens of the answers to a prompt."""
    return max(1, round(TICKS * random.Random(prompt).lognormvariate(0.0, 0.8)))


async def _reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 1.0


def side(words: tuple[str, ...], steps: int, tick_s: float) -> dict[str, float]:
    """Seconds per step and ages of one way to run."""
    sizes = (f"rollout.batch_size={SLOTS}", "rollout.n_samples_per_prompt=1", f"rollout.concurrency={SLOTS}")
    recipe = load_recipe("", (*sizes, f"steps={steps}", *words))
    return asyncio.run(_run(recipe, tick_s))


async def _run(recipe: Recipe, tick_s: float) -> dict[str, float]:
    engine = SleepingEngine(tick_s)
    rows = [Sample(prompt=str(i), tokens=[i]) for i in range(4096)]
    source = PromptSource(rows, 1, seed=0, shuffle=False)
    generator = Generator(engine=engine, reward=_reward, args=HookArgs(recipe), timeout_s=60.0)  # type: ignore[arg-type]
    answering = Answering(recipe, generator, [], None)
    made: AheadCollector | ContinuousCollector | RolloutCollector = RolloutCollector(recipe, source, answering)
    if recipe.rollout.fully_async:
        made = ContinuousCollector(recipe, source, answering, start=0)
    elif recipe.rollout.overlaps:
        inner = RolloutCollector(recipe, source, answering)
        made = AheadCollector(recipe, inner, start=0, stored={}, store=lambda *args: None)
    mean = statistics.fmean(length_of(i) for i in range(1024))
    batches: list[Collection] = []
    begin = time.perf_counter()
    await made.rest()
    await made.proceed(0)
    for step in range(1, recipe.steps + 1):
        batches.append(await made.collect(step))
        await asyncio.sleep(mean * tick_s)
        await made.rest()
        engine.version = step
        if step < recipe.steps:
            await made.proceed(step)
    seconds = (time.perf_counter() - begin) / recipe.steps
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return {
        "s_per_step": seconds,
        "staleness_mean": statistics.fmean(b.metrics["rollout/staleness_mean"] for b in batches),
        "staleness_max": max(b.metrics["rollout/staleness_max"] for b in batches),
    }


def main() -> None:
    """Measure every side, interleaved."""
    flags = _common.parser(__doc__ or "").parse_args()
    steps, tick_s, repeats = (4, 0.0005, 1) if flags.smoke else (40, 0.002, flags.repeats)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(repeats):
        for name, words in SIDES.items():
            found[name].append(side(words, steps, tick_s))
    sides = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    turns = sides["in turns"]["s_per_step"]
    for numbers in sides.values():
        numbers["of_turns"] = turns / numbers["s_per_step"]
    _common.show("steps with long-tailed answers", [{"side": name, **numbers} for name, numbers in sides.items()])
    ratio = sides["never stopping, 2"]["of_turns"]
    _common.finish("overlap", {"ratio": ratio, "steps": steps, "sides": sides}, save=flags.save)


if __name__ == "__main__":
    main()
