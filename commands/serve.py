"""`slime serve`: a model over HTTP, with SGLang's native, OpenAI's and Anthropic's endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimecli.commands._options import ModelOpt, RecipeOpt, RunOpt, SetOpt, refuse_idle, with_fields

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime serve --run quickstart --port 8000",
    "slime serve --model runs/quickstart/export --port 0",
    "slime serve --run quickstart --replicas 2 --router builtin --api-key-env MY_KEY",
    "slime serve --run quickstart --record quickstart --follow quickstart",
]


def serve(
    recipe: Recipe,
    weights: Path,
    *,
    version: int = 0,
    port: int = 8000,
    api_key: str = "",
    follow: RunDir | None = None,
    record: RunDir | None = None,
    learner: Recipe | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM, then stop listening and let requests in flight end; a second one cuts them short.

    Args:
        weights: HF folder.
        version: step that the weights are of.
        port: 0 takes a free one; {"url": ...} is printed on stdout when requests can come.
        follow: take this run's new weights as it commits them.
        record: keep conversations in this run, for training.
        learner: that run's recipe; None: it is `recipe`.
    """
    import asyncio
    import tempfile

    from slimecli.serving.front import Serving, serve_all

    with tempfile.TemporaryDirectory(prefix="slime-serve-") as temporary:
        owner = record or follow
        logs = owner.live_dir / "logs" if owner else Path(temporary)
        asked = Serving(
            recipe=recipe,
            learner=learner or recipe,
            weights=weights,
            version=version,
            logs=logs,
            port=port,
            api_key=api_key,
            follow=follow,
            record=record,
        )
        asyncio.run(serve_all(asked))


def _fields(
    host: Annotated[
        str | None, typer.Option("--host", help="address to bind; loopback unless you say otherwise")
    ] = None,
    engine: Annotated[Literal["embedded", "sglang"] | None, typer.Option("--engine", help="who generates")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", help="engines, each a process of its own")] = None,
    router: Annotated[str | None, typer.Option("--router", help="auto, builtin, smg, sglang or none")] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    ] = None,
) -> None:
    """Flags that stand for fields of the recipe."""


COMMAND = with_fields(
    _fields,
    {
        "host": "engine.host",
        "engine": "engine.backend",
        "replicas": "engine.replicas",
        "router": "engine.router",
        "api_key_env": "engine.api_key_env",
    },
)


def cli(
    run: RunOpt = "",
    model: ModelOpt = "",
    step: Annotated[int | None, typer.Option("--step", help="step of the run; default: the newest")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="port; 0: a free one")] = 8000,
    api_key: Annotated[
        str, typer.Option("--api-key", help="demand this key; visible to `ps`, --api-key-env is not")
    ] = "",
    follow: Annotated[str, typer.Option("--follow", metavar="RUN", help="take its new weights as they come")] = "",
    record: Annotated[str, typer.Option("--record", metavar="RUN", help="keep conversations for its training")] = "",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
) -> None:
    """Serve a model or a run (its name will do for --model); follow a run, and record conversations for it."""
    from slimecli import env
    from slimecli.commands._stages import run_and_recipe
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe
    from slimecli.rundir import is_run, open_run
    from slimecli.session import step_weights
    from slimecli.weights.source import resolve_model_dir

    if model and not run and is_run(model):
        run, model = model, ""
    run = run or ("" if model else follow or record)
    if bool(run) == bool(model):
        raise UsageError("say --run NAME or --model DIR", "see `slime serve --help`")
    overrides, version, target = tuple(set_ or ()), 0, None
    if run:
        refuse_idle({"--recipe": recipe}, "with --run: a run has its own", "--set KEY=VALUE changes single values")
        target, resolved = run_and_recipe(run, overrides)
        version = (target.last_checkpoint() or 0) if step is None else step
        weights = step_weights(target, resolved, version)
    else:
        refuse_idle(
            {"--step": step is not None}, "with --model: only a run has steps", "slime serve --run NAME --step N"
        )
        resolved = load_recipe(recipe, overrides)
        weights = resolve_model_dir(model)
    named = resolved.engine.api_key_env
    if named and not api_key and not (api_key := env.secret(named)):
        raise UsageError(f"the environment variable {named} is empty", f"export {named}=...")
    recorded, learner = run_and_recipe(record, overrides) if record else (None, resolved)
    if recorded and target and not recorded.root.samefile(target.root):
        tell_apart(recorded.name, target.name)
    serve(
        resolved,
        weights,
        version=version,
        port=port,
        api_key=api_key,
        follow=open_run(follow) if follow else None,
        record=recorded,
        learner=learner,
    )


def tell_apart(recorded: str, served: str) -> None:
    """Weight versions are steps of the run that is served."""
    from slimecli import console

    console.warn(
        f"run {recorded} is to learn from what run {served} says: the versions of recorded answers are {served}'s "
        f"steps, so live.max_staleness cannot tell how old they are for {recorded}"
    )
