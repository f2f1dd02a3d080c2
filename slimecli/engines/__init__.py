"""Rollout engines: the embedded one, and clients of servers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from slimecli import files
from slimecli.errors import SlimeError, nearest
from slimecli.protocols import RolloutEngine
from slimecli.recipe import Recipe

if TYPE_CHECKING:
    from slimecli.engines.embedded.engine import EmbeddedEngine

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
    if logs is not None:
        _log_to(logs)
    return open_embedded(recipe, model_dir)


def open_embedded(recipe: Recipe, model_dir: Path) -> EmbeddedEngine:
    """The embedded engine in this process."""
    from slimecli.engines.embedded.engine import EmbeddedEngine

    section = recipe.engine
    return EmbeddedEngine(
        model_dir,
        slots=section.slots,
        max_context=fitting_context(recipe, model_dir),
        dtype=section.dtype,
        threads=section.threads,
    )


def fitting_context(recipe: Recipe, model_dir: Path) -> int:
    """engine.max_context where it is set; else what the recipe needs, or what the model has if that is less (tokens).

    A request that does not fit is refused by itself, with its numbers.
    """
    if recipe.engine.max_context:
        return recipe.engine.max_context
    positions = files.read_json(model_dir / "config.json").get("max_position_embeddings")
    return min(recipe.max_context, positions or recipe.max_context)


def _log_to(folder: Path) -> None:
    """Engine logs go to folder/engine.log, and nowhere else; the file appears with the first line."""
    log = logging.getLogger("slimecli.engine")
    for handler in [h for h in log.handlers if isinstance(h, logging.FileHandler)]:
        log.removeHandler(handler)
        handler.close()
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "engine.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
