"""`slime serve`: a model over HTTP, with SGLang's native and OpenAI's endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimecli.commands._options import ModelOpt, RecipeOpt, RunOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.recipe import Recipe

EXAMPLES = [
    "slime serve --run quickstart --port 8000",
    "slime serve --model runs/quickstart/export --port 0",
]


async def serve(recipe: Recipe, model_dir: Path, *, host: str, port: int, api_key: str) -> None:
    """Serve until Ctrl-C or SIGTERM, then stop listening and let requests in flight end; a second one cuts them short.

    Args:
        port: 0 takes a free one; {"url": ...} is printed on stdout when requests can come.
    """
    import asyncio
    import signal

    from slimecli import console
    from slimecli.engines import open_embedded
    from slimecli.engines.embedded.server import Server

    engine = open_embedded(recipe, model_dir)
    server, stop = Server(engine, api_key=api_key, drain_s=recipe.rollout.request_timeout_s), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        url = await server.start(host, port)
        console.emit({"url": url})
        console.say(f"serving {model_dir} at {url} (Ctrl-C stops)")
        await stop.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: asyncio.ensure_future(engine.abort()))
        if open_requests := engine.info()["running"] + engine.info()["waiting"]:
            console.say(f"finishing {open_requests} request(s); Ctrl-C again cuts them short")
    finally:
        await server.stop()
        await engine.close()


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
    import asyncio

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
    asyncio.run(serve(resolved, weights, host=host or resolved.engine.host, port=port, api_key=api_key))
