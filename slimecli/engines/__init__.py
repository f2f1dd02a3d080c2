"""Rollout engines: the embedded one, and clients of servers."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from slimecli import env, files
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.recipe import Recipe

if TYPE_CHECKING:
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.http import HttpEngine


def open_engine(recipe: Recipe, model_dir: Path, *, logs: Path | None = None) -> RolloutEngine:
    """Clients of engine.urls where given, else the embedded engine in this process or a client of an own SGLang server.

    Args:
        logs: folder of engine.log: what an SGLang server writes, or the tracebacks of the embedded engine's thread.
    """
    section = recipe.engine
    if section.urls:
        from slimecli.engines.attached import attach

        return attach(recipe, log=logs / "engines.log" if logs else None)
    if section.backend == "sglang":
        from slimecli.engines.sglang.engine import open_sglang

        return open_sglang(recipe, model_dir, (logs or Path(tempfile.mkdtemp(prefix="slime-sglang-"))) / "engine.log")
    if logs is not None:
        _log_to(logs)
    return open_embedded(recipe, model_dir)


def connect(recipe: Recipe, url: str) -> HttpEngine:
    """A client of a running server, with the recipe's deadline, retries and key."""
    from slimecli.engines.http import HttpEngine

    return HttpEngine(url, timeout_s=longest_call(recipe), retries=recipe.rollout.max_retries, api_key=api_key(recipe))


def longest_call(recipe: Recipe) -> float:
    """Deadline of a client's calls, of any kind (seconds): an answer's and an update's own are kept by who waits."""
    return max(recipe.rollout.request_timeout_s, recipe.sync.timeout_s)


def api_key(recipe: Recipe) -> str:
    """The key that servers ask for and clients send; empty for none."""
    name = recipe.engine.api_key_env
    if not name:
        return ""
    key = env.secret(name)
    if not key:
        raise SlimeError(f"engine.api_key_env = {name!r}: that variable is not set", f"export {name}=...")
    return key


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


class _EngineLog(logging.FileHandler):
    """Where it cannot write (a full disk, a folder that is gone) the engine goes on, and answers those who wait."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record, if it can be written."""
        with contextlib.suppress(OSError):
            super().emit(record)


def _log_to(folder: Path) -> None:
    """Engine logs go to folder/engine.log, and nowhere else; the file appears with the first line."""
    log = logging.getLogger("slimecli.engine")
    for handler in [h for h in log.handlers if isinstance(h, logging.FileHandler)]:
        log.removeHandler(handler)
        handler.close()
    folder.mkdir(parents=True, exist_ok=True)
    handler = _EngineLog(folder / "engine.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
