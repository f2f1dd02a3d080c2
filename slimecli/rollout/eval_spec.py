"""What an evaluation measured, stated in full beside its hash, so that only like is compared with like."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slimecli.data_tools.rewards.version import hook_version, scorer_version
from slimecli.recipe import Recipe
from slimecli.rollout.custom import GENERATE
from slimecli.types import Sample

NOT_MEASURED = {"timeout_s", "retries"}
"""fields of [reward] that say how a score is waited for, not what it is"""

Spec = dict[str, Any]


def make_spec(rows: Sequence[Sample], recipe: Recipe, sampling: Mapping[str, Any], n: int, template: str) -> Spec:
    """Everything that makes two evaluations comparable; weights, engine and machine are what is compared.

    Args:
        rows: the prompts that are asked, rendered.
        recipe: with the set's own values.
        sampling: as sent to the engine, without the seed.
        n: answers per prompt.
        template: the tokenizer's chat template.
    """
    kinds = {str(s.metadata["rm_type"]) for s in rows if s.metadata.get("rm_type")}
    settings = recipe.reward.model_dump(mode="json", exclude=NOT_MEASURED)
    return {
        "prompts": {"sha256": _hash([[s.prompt, s.label, s.metadata] for s in rows]), "count": len(rows)},
        "template": {
            "chat": _hash(template) if recipe.data.apply_chat_template else "",
            "system_prompt": recipe.data.system_prompt,
            "prompt": recipe.data.prompt_template,
        },
        "samples_per_prompt": n,
        "sampling": {k: v for k, v in sampling.items() if k != "sampling_seed"},
        "seed": recipe.eval.seed,
        "generate": generate_spec(recipe),
        "scorer": {
            **settings,
            "rm_types": sorted(kinds),
            "version": scorer_version(recipe.reward, kinds),
        },
    }


def generate_spec(recipe: Recipe) -> Spec:
    """The generate function, a hash of its file, and the tools of a built-in one."""
    name = recipe.rollout.custom_generate
    return {
        "function": name,
        "version": hook_version(GENERATE.get(name, name)) if name else "",
        "tools": recipe.tools.model_dump(mode="json") if name in GENERATE else {},
    }


def spec_hash(spec: Spec) -> str:
    """16 hexadecimal digits."""
    return _hash(spec)[:16]


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) of everything in which two specs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in sorted(a.keys() | b.keys()):
            found += differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if a == b else [(path or "spec", a, b)]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
