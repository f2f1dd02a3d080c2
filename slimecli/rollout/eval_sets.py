"""The sets of an evaluation: what each one changes in the recipe, and its prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimecli.recipe import Recipe
from slimecli.recipe_rollout import EvalSetSection
from slimecli.types import Sample

_DATA = (
    "input_key",
    "label_key",
    "metadata_key",
    "tool_key",
    "convert",
    "system_prompt",
    "prompt_template",
    "apply_chat_template",
    "max_prompt_tokens",
)
_EVAL = ("n_samples_per_prompt", "temperature", "top_p", "top_k", "max_response_tokens", "max_prompts")
_ROLLOUT = ("stop", "custom_generate")
"""fields of a set -> the section in which each stands for all sets"""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Prompts to be answered, and how."""

    name: str
    rows: Sequence[Sample]
    """pending templates"""
    recipe: Recipe | None = None
    """the run's recipe with what this set changes; None: it changes nothing"""
    template: str = ""
    """the tokenizer's chat template, for the spec"""


def set_recipe(recipe: Recipe, settings: EvalSetSection) -> Recipe:
    """The recipe as this set sees it."""
    stated = {k: v for k in EvalSetSection.model_fields if (v := getattr(settings, k)) is not None}
    reward: dict[str, Any] = {}
    if settings.reward is not None:
        is_path = ":" in settings.reward or "." in settings.reward
        reward = {"path": settings.reward} if is_path else {"type": settings.reward, "path": ""}
        reward["group"] = False  # what the run's scorer takes says nothing about this one
    if settings.reward_key is not None:
        reward["key"] = settings.reward_key
    if settings.reward_group is not None:
        reward["group"] = settings.reward_group
    sections = {"data": _DATA, "eval": _EVAL, "rollout": _ROLLOUT}
    changes = {
        name: getattr(recipe, name).model_copy(update={k: stated[k] for k in fields if k in stated})
        for name, fields in sections.items()
    }
    changed = recipe.model_copy(update={**changes, "reward": recipe.reward.model_copy(update=reward)})
    return recipe if changed == recipe else changed


def load_sets(
    recipe: Recipe,
    sets: Mapping[str, EvalSetSection],
    prompts: Callable[[str, Recipe], list[Sample]],
    template: str,
) -> list[EvalSet]:
    """Read every set, in the order of their names.

    Args:
        prompts: (file, recipe as the set sees it) -> pending samples.
        template: the tokenizer's chat template.
    """
    found = []
    for name, settings in sorted(sets.items()):
        own = set_recipe(recipe, settings)
        rows = prompts(settings.path, own)[: own.eval.max_prompts or None]
        found.append(EvalSet(name=name, rows=rows, recipe=own, template=template))
    return found
