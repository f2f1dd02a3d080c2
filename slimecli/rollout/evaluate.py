"""Held-out evaluation: the same code in the loop, in `slime eval` and at the end of a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimecli.errors import SlimeError
from slimecli.recipe import Recipe
from slimecli.rollout.generate import Generator, failure
from slimecli.rollout.sampling import eval_sampling
from slimecli.seeds import derive_seed
from slimecli.types import Group, Sample, SampleStatus


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Prompts to be answered, and where they came from."""

    name: str
    rows: Sequence[Sample]
    """pending templates"""


async def evaluate(
    recipe: Recipe, generator: Generator, sets: Sequence[EvalSet], stop_token_ids: list[int], *, greedy: bool
) -> dict[str, Any]:
    """Answer and score every set once.

    Returns: per set {"mean", "stderr", "n", "prompts", "pass@k", "response_length", "truncated", "failed", "spec",
    "samples"}. `spec` hashes prompts, sampling and scorer: two results are comparable only when it is equal.
    """
    results = {}
    for item in sets:
        rows = item.rows[: recipe.eval.max_prompts or None]
        sampling = eval_sampling(recipe, stop_token_ids, greedy=greedy)
        n = 1 if greedy else recipe.eval.n_samples_per_prompt
        slots = asyncio.Semaphore(max(1, recipe.rollout.concurrency // n))
        groups = await asyncio.gather(
            *(_answer(recipe, generator, slots, sampling, (item.name, i), row, n) for i, row in enumerate(rows))
        )
        results[item.name] = summarise(groups, recipe, sampling)
    return results


async def _answer(
    recipe: Recipe,
    generator: Generator,
    slots: asyncio.Semaphore,
    sampling: dict[str, Any],
    where: tuple[str, int],
    row: Sample,
    n: int,
) -> Group:
    name, number = where
    group = row.copies(n)
    for i, sample in enumerate(group):
        sample.group_index, sample.index = number, number * n + i
    params = [sampling | {"sampling_seed": derive_seed(recipe.seed, "eval", name, number, i)} for i in range(n)]
    async with slots:
        return await generator.group(group, params)


def summarise(groups: Sequence[Group], recipe: Recipe, sampling: dict[str, Any]) -> dict[str, Any]:
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
    scores = [s.get_reward_value(key) for s in finished]
    mean = sum(scores) / len(scores)
    variance = sum((x - mean) ** 2 for x in scores) / max(len(scores) - 1, 1)
    per_prompt = [[s.get_reward_value(key) for s in g if s.status is not SampleStatus.FAILED] for g in groups]
    return {
        "mean": mean,
        "stderr": math.sqrt(variance / len(scores)),
        "n": len(scores),
        "prompts": len(groups),
        "pass@k": {str(k): value for k, value in pass_at_k(per_prompt).items()},
        "response_length": sum(s.response_length for s in finished) / len(finished),
        "truncated": sum(s.status is SampleStatus.TRUNCATED for s in finished) / len(finished),
        "failed": len(failed),
        "spec": eval_spec(groups, recipe, sampling),
        "samples": [_brief(s) for s in samples[:64]],
    }


def pass_at_k(scores: Sequence[Sequence[float]]) -> dict[int, float]:
    """Unbiased pass@k (Chen et al. 2021, arXiv:2107.03374, eq. 1) for k = 1, 2, 4, ... up to the smallest group."""
    groups = [g for g in scores if g]
    smallest = min((len(g) for g in groups), default=0)
    ks = [2**i for i in range(smallest.bit_length()) if 2**i <= smallest]
    result = {}
    for k in ks:
        chances = []
        for group in groups:
            n, c = len(group), sum(x >= 1.0 for x in group)
            chances.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
        result[k] = sum(chances) / len(chances)
    return result


def eval_spec(groups: Sequence[Group], recipe: Recipe, sampling: dict[str, Any]) -> str:
    """Hash of everything that makes two evaluations comparable."""
    stated = {k: v for k, v in sampling.items() if k != "sampling_seed"}
    digest = hashlib.sha256(json.dumps([stated, recipe.reward.model_dump()], sort_keys=True).encode())
    for group in groups:
        prompt_ids = group[0].tokens[: group[0].prompt_length]
        digest.update(json.dumps([prompt_ids, group[0].label, len(group)]).encode())
    return digest.hexdigest()[:16]


def _brief(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
    }
