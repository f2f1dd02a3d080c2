"""Routers in front of several engines: the built-in one, smg, or sglang-router, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimecli.errors import SlimeError, UsageError

if TYPE_CHECKING:
    from slimecli.engines.router.launch import Router
    from slimecli.recipe import Recipe


def router_program(recipe: Recipe, *, api_key: str = "") -> str:
    """The router that engine.router stands for, `none` included; `auto` is smg where it is installed."""
    from slimecli.engines.router.programs import find

    name = recipe.engine.router
    if name != "auto":
        return name
    return "smg" if find("smg") and not api_key else "builtin"


def start_router(
    recipe: Recipe,
    urls: Sequence[str],
    *,
    host: str,
    port: int,
    log: Path,
    api_key: str = "",
    on_death: Callable[[SlimeError], None] | None = None,
    roles: Sequence[tuple[str, int]] = (),
) -> Router:
    """Start the recipe's router in front of engines and wait until it answers.

    Args:
        host: address to listen on; loopback unless others must reach it.
        port: 0 takes a free one.
        log: file that gets what the router says.
        api_key: clients must send it, and it is passed on to the engines; the built-in router alone asks for one.
        roles: per engine (prefill or decode, port at which results of prompts are fetched); empty: all are alike.
        on_death: called, from a thread, when the router died and engine.on_failure or max_restarts forbid a restart.

    Raises SlimeError with the end of its log if it does not start; RecipeError for wrong [router] arguments.
    """
    from slimecli.engines.router.launch import Launch, Router
    from slimecli.engines.router.programs import command, words

    name = router_program(recipe, api_key=api_key)
    if name == "none":
        raise UsageError("engine.router = 'none', but a router is asked for", '--set engine.router="auto"')
    if api_key and name != "builtin":
        raise UsageError(f"{name} does not ask clients for an API key", '--set engine.router="builtin"')
    section = recipe.engine
    launch = Launch(
        name=name,
        line=(*command(name), *words(name, recipe.router)),
        host=host,
        port=port,
        log=log,
        api_key=api_key,
        timeout_s=section.start_timeout_s,
        max_restarts=section.max_restarts if section.on_failure == "restart" else 0,
        roles=dict(zip([u.rstrip("/") for u in urls], roles, strict=True)) if roles else {},
    )
    return Router(launch, urls, on_death)
