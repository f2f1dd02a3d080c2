"""Held-out evaluation: the same code in the loop, in `slime eval` and at the end of a run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from slimecli.errors import SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.custom import load_generate
from slimecli.rollout.eval_sets import EvalSet
from slimecli.rollout.eval_spec import make_spec, spec_hash
from slimecli.rollout.executions import scores, stats
from slimecli.rollout.generate import Generator, failure
from slimecli.rollout.sampling import eval_sampling
from slimecli.rollout.scores import summarise_scores
from slimecli.seeds import derive_seed
from slimecli.types import Group, Sample, SampleStatus

SAMPLES_KEPT = 64
"""answers of a set that are kept in full with its scores"""


async def evaluate(
    recipe: Recipe, generator: Generator, sets: Sequence[EvalSet], stop_token_ids: list[int], *, greedy: bool
) -> dict[str, Any]:
    """Answer and score every set once, all of them at the same time.

    Returns: per set {"mean", "stderr", "interval", "n", "prompts", "samples_per_prompt", "pass@k", "pass@k_interval",
    "response_length", "truncated", "failed", "stats", "spec", "spec_hash", "scores", "samples"}. Two results are
    comparable only when their spec is equal (slimecli.rollout.comparison).
    """
    generator = dataclasses.replace(generator, evaluation=True)
    most = max((_answers(item.recipe or recipe, greedy) for item in sets), default=1)
    slots = asyncio.Semaphore(max(1, recipe.rollout.concurrency // most))
    results = await asyncio.gather(
        *(_one_set(item, item.recipe or recipe, generator, stop_token_ids, slots, greedy) for item in sets)
    )
    return {item.name: result for item, result in zip(sets, results, strict=True)}


def _answers(recipe: Recipe, greedy: bool) -> int:
    return 1 if greedy else recipe.eval.n_samples_per_prompt


async def _one_set(
    item: EvalSet,
    recipe: Recipe,
    generator: Generator,
    stop_token_ids: list[int],
    slots: asyncio.Semaphore,
    greedy: bool,
) -> dict[str, Any]:
    rows = item.rows[: recipe.eval.max_prompts or None]
    sampling = eval_sampling(recipe, stop_token_ids, greedy=greedy)
    n = _answers(recipe, greedy)
    own = _own_generator(generator, recipe) if item.recipe is not None else generator

    async def answer(number: int, row: Sample) -> Group:
        group = row.copies(n)
        for i, sample in enumerate(group):
            sample.group_index, sample.index = number, number * n + i
        # by place, not by the set's name: the same prompts asked in the same way get the same answers
        seeds = [derive_seed(recipe.eval.seed, "eval", number, i) for i in range(n)]
        async with slots:
            return await own.group(group, [sampling | {"sampling_seed": seed} for seed in seeds])

    groups = await asyncio.gather(*(answer(i, row) for i, row in enumerate(rows)))
    spec = make_spec(rows, recipe, sampling, n, item.template)
    return summarise(groups, recipe, spec)


def _own_generator(generator: Generator, recipe: Recipe) -> Generator:
    """The same engine with the reward and hooks of a set that names its own."""
    base: Recipe = generator.args.recipe
    if recipe == base:
        return generator
    from slimecli.data_tools.rewards import load_reward

    custom = recipe.rollout.custom_generate
    return dataclasses.replace(
        generator,
        args=generator.args.with_recipe(recipe),
        reward=generator.reward if recipe.reward == base.reward else load_reward(recipe.reward),
        group_reward=recipe.reward.group,
        custom=generator.custom
        if custom == base.rollout.custom_generate
        else (load_generate(custom, recipe) if custom else None),
    )


def summarise(groups: Sequence[Group], recipe: Recipe, spec: dict[str, Any]) -> dict[str, Any]:
    """Scores of one set; failed answers are counted, never scored as zero, and no more than the recipe tolerates."""
    key = recipe.reward.key or None
    samples = [s for g in groups for s in g]
    finished = [s for s in samples if s.status is not SampleStatus.FAILED]
    failed = [s for s in samples if s.status is SampleStatus.FAILED]
    if not finished or len(failed) > recipe.rollout.max_failed_fraction * len(samples):
        reason = failure(failed[0]) if failed else "the set is empty"
        raise SlimeError(
            f"evaluation: {len(failed)} of {len(samples)} answers failed "
            f"(allowed: {recipe.rollout.max_failed_fraction:.0%}); the first: {reason}",
            "mend the cause; a higher rollout.max_failed_fraction tolerates more",
        )
    found = [scores(g, key) for g in groups]
    return {
        **summarise_scores(found),
        "samples_per_prompt": spec["samples_per_prompt"],
        "response_length": sum(s.response_length for s in finished) / len(finished),
        "truncated": sum(s.status is SampleStatus.TRUNCATED for s in finished) / len(finished),
        "failed": len(failed),
        "stats": stats(finished),
        "spec": spec,
        "spec_hash": spec_hash(spec),
        "scores": found,
        "samples": [_brief(s) for s in samples[:SAMPLES_KEPT]],
    }


def _brief(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
    }
