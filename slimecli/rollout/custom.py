"""Generate functions: slime's own by name, users' by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimecli.data_tools.hooks import load_hook
from slimecli.lookup import look_up
from slimecli.recipe import Recipe

GENERATE: dict[str, str] = {"tool_loop": "slimecli.rollout.tool_loop:ToolLoop"}
"""name -> class, made with the recipe's tools; called as async (args, sample, sampling_params)"""

_open: dict[tuple[str, str], Any] = {}
"""(name, tools) -> what is open: evaluation sets share the servers of the training rollout"""


def load_generate(name: str, recipe: Recipe) -> Callable[..., Any]:
    """The generate function that a recipe names, ready to be called."""
    if ":" in name or "." in name:
        return load_hook(name, ("args", "sample", "sampling_params"))
    make = look_up(GENERATE, name, "generate function", "rollout.custom_generate: {known}, or file.py:function")
    key = (name, recipe.tools.model_dump_json())
    if key not in _open:
        _open[key] = make(recipe.tools)
    found: Callable[..., Any] = _open[key]
    return found


def hold_open(what: str, thing: Any) -> None:
    """Have `close_generate` end this too: it has a `close`."""
    _open[(what, str(id(thing)))] = thing


def close_generate() -> None:
    """End what generate functions hold open: servers of tools, servers for agents."""
    while _open:
        _open.popitem()[1].close()


def wants_messages(recipe: Recipe) -> bool:
    """Whether prompts are needed as messages, for a generate function that renders conversations itself.

    An own function says so by an attribute: `generate.wants_messages = True`.
    """
    named = [recipe.rollout.custom_generate, *(s.custom_generate for s in recipe.eval.sets.values())]
    own = [name for name in named if name and name not in GENERATE]
    return any(name in GENERATE for name in named) or any(
        getattr(load_generate(name, recipe), "wants_messages", False) for name in own
    )
