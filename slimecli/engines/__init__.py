"""Rollout engines: the embedded one, and clients of servers."""

from __future__ import annotations

from pathlib import Path

from slimecli.errors import SlimeError, nearest
from slimecli.protocols import RolloutEngine
from slimecli.recipe import Recipe

ENGINES = {
    "embedded": "slimecli.engines.embedded.engine:EmbeddedEngine",
    "http": "slimecli.engines.http:HttpEngine",
}
"""in this process, or at engine.urls"""


def open_engine(recipe: Recipe, model_dir: Path, *, logs: Path | None = None) -> RolloutEngine:
    """Clients of engine.urls where given, else the embedded engine in this process.

    Args:
        logs: folder of engine.log, where failures of the engine's thread leave their traceback.
    """
    section = recipe.engine
    if section.urls:
        from slimecli.engines.http import HttpEngine
        from slimecli.engines.pool import EnginePool

        timeout_s, retries = recipe.rollout.request_timeout_s, recipe.rollout.max_retries
        return EnginePool([HttpEngine(url, timeout_s=timeout_s, retries=retries) for url in section.urls])
    if section.backend not in ENGINES:
        raise SlimeError(
            f"engine.backend {section.backend!r} does not run in this process{nearest(section.backend, list(ENGINES))}",
            'start the servers and set engine.urls, or --set engine.backend="embedded"',
        )
    from slimecli.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(
        model_dir, slots=section.slots, max_context=recipe.max_context, dtype=section.dtype, threads=section.threads
    )
