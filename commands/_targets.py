"""What `--model` may name where a model is only asked: an HF folder, a registry model, or the URL of a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slimecli.engines.http import HttpEngine
    from slimecli.recipe import Recipe

T = TypeVar("T")


def open_target(model: str, recipe: Recipe) -> tuple[Path, Recipe]:
    """(folder with the tokenizer, and with the weights unless a server holds them; recipe with the engine to ask)."""
    from slimecli.weights.source import resolve_model_dir

    if not model.startswith(("http://", "https://")):
        return resolve_model_dir(model), recipe
    served = recipe.engine.model_copy(update={"urls": [model]})
    return _served_folder(model, recipe), recipe.model_copy(update={"engine": served})


def _served_folder(url: str, recipe: Recipe) -> Path:
    """Folder with the tokenizer of what a server serves.

    That is model.path where the recipe names one, else the folder that the server says it loaded, else the registry
    model's.
    """
    import asyncio

    from slimecli.engines.http import HttpEngine
    from slimecli.errors import UsageError
    from slimecli.headers import config_folder
    from slimecli.model_specs import get_spec
    from slimecli.weights.source import TOKENIZER_FILES, fetch_spec

    engine = HttpEngine(url, timeout_s=recipe.rollout.request_timeout_s)
    if recipe.model.path:
        asyncio.run(_ask(engine, HttpEngine.health))  # one that is not there is told now, not waited for
        return config_folder(Path(recipe.model.path).expanduser())
    info = asyncio.run(_ask(engine, HttpEngine.info))
    folder = Path(str(info.get("tokenizer_path") or info.get("model_path") or ""))
    if (folder / "tokenizer.json").is_file():
        return folder
    if recipe.model.name and get_spec(recipe.model.name).repo:
        wanted = (*TOKENIZER_FILES, "generation_config.json", "config.json")
        return fetch_spec(get_spec(recipe.model.name), revision=recipe.model.revision, allow=wanted).folder
    raise UsageError(
        f"the server at {url} has its tokenizer in {folder}, which is not on this machine",
        "name a folder with the tokenizer: --set model.path=DIR",
    )


async def _ask(engine: HttpEngine, question: Callable[[HttpEngine], Awaitable[T]]) -> T:
    try:
        return await question(engine)
    finally:
        await engine.close()
