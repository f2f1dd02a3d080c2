"""Sampling parameters as SGLang takes them, and the seed of every answer."""

from __future__ import annotations

from typing import Any

from slimecli.recipe import Recipe
from slimecli.seeds import derive_seed


def rollout_sampling(recipe: Recipe, stop_token_ids: list[int]) -> dict[str, Any]:
    """Parameters shared by all answers of a rollout, without the seed."""
    section = recipe.rollout
    return {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
        "max_new_tokens": section.max_response_tokens,
        "stop": list(section.stop),
        "stop_token_ids": sorted({*section.stop_token_ids, *stop_token_ids}),
        "skip_special_tokens": True,
        "no_stop_trim": True,
    }


def eval_sampling(recipe: Recipe, stop_token_ids: list[int], *, greedy: bool) -> dict[str, Any]:
    """Parameters of an evaluation, apart from those of training; greedy at temperature 0."""
    section = recipe.eval
    budget = section.max_response_tokens or recipe.rollout.max_response_tokens
    common = rollout_sampling(recipe, stop_token_ids) | {"min_p": 0.0, "max_new_tokens": budget}
    if greedy:
        return common | {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return common | {"temperature": section.temperature, "top_p": section.top_p, "top_k": section.top_k}


def rollout_seed(recipe: Recipe, step: int, group_index: int, position: int) -> int:
    """Seed of answer `position` of group `group_index` at `step`."""
    return derive_seed(recipe.seed, "rollout", step, group_index, position)
