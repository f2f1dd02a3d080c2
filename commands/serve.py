"""`slime serve`: a model over HTTP, with SGLang's native and OpenAI's endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimecli.commands._options import ModelOpt, RecipeOpt, RunOpt, SetOpt

EXAMPLES = [
    "slime serve --run quickstart --port 8000",
    "slime serve --model runs/quickstart/export --port 0",
]


def serve(model_dir: Path, *, host: str, port: int, api_key: str, slots: int, max_context: int) -> None:
    """Serve until Ctrl-C or SIGTERM; requests in flight are finished first.

    Args:
        port: 0 takes a free one; the address is printed either way.
    """
    from slimecli.engines.embedded.server import run_server

    run_server(model_dir, host=host, port=port, api_key=api_key, slots=slots, max_context=max_context)


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    host: Annotated[str, typer.Option("--host", help="address to bind; loopback unless you say otherwise")] = "",
    port: Annotated[int, typer.Option("--port", help="port; 0: a free one")] = 8000,
    api_key: Annotated[str, typer.Option("--api-key", help="demand this key as a Bearer token")] = "",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
) -> None:
    """Serve a model or a run's weights with the embedded engine."""
    from slimecli.commands._stages import run_and_recipe
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe
    from slimecli.session import step_weights
    from slimecli.weights.source import resolve_model_dir

    if bool(run) == bool(model):
        raise UsageError("say --run NAME or --model DIR", "see `slime serve --help`")
    overrides = tuple(set_ or ())
    if run:
        target, resolved = run_and_recipe(run, overrides)
        weights = step_weights(target, resolved, (target.last_checkpoint() or 0) if step is None else step)
    else:
        resolved = load_recipe(recipe, overrides)
        weights = resolve_model_dir(model)
    section = resolved.engine
    serve(
        weights,
        host=host or section.host,
        port=port,
        api_key=api_key,
        slots=section.slots,
        max_context=resolved.max_context,
    )
