"""Where frozen models that are served beside the policy can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from slimecli.errors import UsageError
from slimecli.protocols import RolloutEngine
from slimecli.recipe import Recipe
from slimecli.recipe_reward import RewardSection
from slimecli.topology import named_model

Models = Mapping[str, RolloutEngine]
"""name -> all servers of that model as one"""


def served(models: Models, name: str) -> RolloutEngine:
    """The model of that name."""
    if name not in models:
        raise UsageError(
            f"no model {name!r} is served here", "`slime run` on Ray serves engine.models; else give an address"
        )
    return models[name]


def url_of(engine: RolloutEngine) -> str:
    """The address that others reach an engine by: its router's, or its own; empty for one in this process."""
    return str(getattr(engine, "address", "") or getattr(engine, "url", "") or "")


def address_of(engine: RolloutEngine) -> tuple[str, int]:
    """(host, port) for hooks that speak HTTP themselves; ("", 0) for an engine in this process."""
    url = urlsplit(url_of(engine))
    return url.hostname or "", url.port or 0


def addresses(models: Models) -> dict[str, tuple[str, int]]:
    """Name -> (host, port)."""
    return {name: address_of(engine) for name, engine in models.items()}


def reward_of(recipe: Recipe, models: Models) -> RewardSection:
    """The reward section, with an address where the judge is a served model."""
    name = named_model(recipe.reward.judge.url)
    if not name:
        return recipe.reward
    judge = recipe.reward.judge.model_copy(update={"url": url_of(served(models, name))})
    return recipe.reward.model_copy(update={"judge": judge})
