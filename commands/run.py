"""`slime run`: every stage in order, the RL loop on Ray, resumable at any point."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, MegatronArgs, ModelOpt, RecipeOpt, RunOpt, SetOpt
from slimecli.errors import InterruptedRunError, SlimeError, UsageError, nearest

if TYPE_CHECKING:
    from slimecli.cluster import Cluster
    from slimecli.observe.display import Progress
    from slimecli.observe.trackers import Tracker
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir
    from slimecli.stage import Stage

EXAMPLES = [
    "slime run --recipe quickstart --run quickstart",
    "slime run --resume --run quickstart --set steps=200",
]


SFT_LINES = 40
"""lines of progress for a whole SFT stage: its steps are short and many"""


class StopFlag:
    """First Ctrl-C or SIGTERM: finish the step, make a checkpoint, stop. Second: stop at once."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self) -> bool:
        return self.raised

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for the duration of a block."""

        def handle(number: int, frame: Any) -> None:
            from slimecli import console

            if self.raised:
                raise KeyboardInterrupt
            self.raised = True
            console.say("\nstopping after this step (Ctrl-C again: at once)")

        old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def run_pipeline(
    run: RunDir, recipe: Recipe, progress: Progress, *, until: str = "", change: str = ""
) -> dict[str, Any]:
    """Do every stage that is new, in order.

    Args:
        run: the run directory; locked for the duration.
        until: name of the last stage to do; empty: all.
        change: why `recipe` differs from the one stored in the run; empty: it does not.

    Returns: {"run", "stages": {name: "done" | "skipped"}, ...}.
    """
    from slimecli.commands import _stages
    from slimecli.observe.trackers import open_trackers
    from slimecli.pipeline import PIPELINE

    if until and until not in PIPELINE:
        raise UsageError(f"no stage {until!r}{nearest(until, list(PIPELINE))}", f"stages: {', '.join(PIPELINE)}")
    stop, clusters, last = StopFlag(), contextlib.ExitStack(), [s for s in PIPELINE.values() if s.wanted(recipe)][-1]
    done: dict[str, str] = {}
    with run.lock(), clusters, stop.installed():
        refuse_mixing(run, recipe)
        if change:
            run.change_recipe(recipe, why=change)
        run.new_attempt()
        clusters.enter_context(_noting_failure(run))
        _look_at_engines(run, recipe, until)
        is_due = _trains(run, recipe, until)
        if is_due:
            _stages.tell_backend(run, recipe)
        cluster = _open_cluster(run, recipe, clusters) if is_due else None
        trackers = open_trackers(recipe, run)
        for tracker in trackers:
            clusters.callback(tracker.close)
        works = _works(run, recipe, cluster, progress, trackers, stop)
        for stage in PIPELINE.values():
            if stage.wanted(recipe):
                done[stage.name] = _ensure(stage, run, recipe, works[stage.name], progress)
            if stage.name == until:
                break
            if stop() and stage is not last:
                raise InterruptedRunError(f"stopped after the stage {stage.name}; nothing is lost")
    return {"run": str(run.root), "stages": done}


@contextlib.contextmanager
def _noting_failure(run: RunDir) -> Iterator[None]:
    """Keep why an attempt ended in error.json. Only the owner of the lock does: others have no say in this run."""
    from slimecli.files import write_json

    run.error_path.unlink(missing_ok=True)
    try:
        yield
    except (SlimeError, KeyboardInterrupt) as error:
        known = error if isinstance(error, SlimeError) else InterruptedRunError("stopped at once")
        with contextlib.suppress(SlimeError):  # a full disk must not hide why the attempt ended
            write_json(run.error_path, {"what": known.what, "fix": known.fix, "exit_code": int(known.exit_code)})
        raise known from None


def _trains(run: RunDir, recipe: Recipe, until: str) -> bool:
    """Whether a training stage is due."""
    from slimecli.pipeline import PIPELINE
    from slimecli.stage import why_new

    training = [PIPELINE[name] for name in ("sft", "loop") if until not in ("data", "model", "frozen")]
    return any(s.wanted(recipe) and why_new(s, run, recipe) for s in training)


def _open_cluster(run: RunDir, recipe: Recipe, stack: contextlib.ExitStack) -> Cluster | None:
    """One Ray for all training stages that are due, started before the first of them."""
    from slimecli.cluster import open_cluster

    if recipe.cluster.backend != "ray":
        return None
    cluster = open_cluster("ray", recipe, run)
    stack.callback(cluster.close)
    return cluster


def _look_at_engines(run: RunDir, recipe: Recipe, until: str) -> None:
    """Engines that others run are looked for before anything is made for them, unless they may come later."""
    from slimecli.engines.attached import check_engines
    from slimecli.pipeline import PIPELINE
    from slimecli.stage import why_new

    loop, section = PIPELINE["loop"], recipe.engine
    is_due = until in ("", "loop", "export") and loop.wanted(recipe) and why_new(loop, run, recipe)
    if section.urls and not section.urls_wait_s and is_due:
        check_engines(recipe)


def _works(
    run: RunDir, recipe: Recipe, cluster: Cluster | None, progress: Progress, trackers: list[Tracker], stop: StopFlag
) -> dict[str, Callable[[], dict[str, Any]]]:
    from slimecli.commands import _stages

    def show_sft(step: int, metrics: dict[str, Any], perf: dict[str, float]) -> None:
        if step % max(1, recipe.sft.steps // SFT_LINES) == 0:
            progress.step(step, recipe.sft.steps, metrics, perf, stage="sft")

    def show_loop(step: int, metrics: dict[str, Any], perf: dict[str, float]) -> None:
        progress.step(step, recipe.steps, metrics, perf, stage="loop")
        for tracker in trackers:
            tracker.log(step, metrics | perf)

    common: dict[str, Any] = {"cluster": cluster, "stop_requested": stop}
    return {
        "data": lambda: _stages.do_data(run, recipe),
        "model": lambda: _stages.do_model(run, recipe),
        "frozen": lambda: _stages.do_frozen(run, recipe),
        "sft": lambda: _stages.do_sft(run, recipe, on_step=show_sft, **common),
        "loop": lambda: _stages.do_loop(run, recipe, on_step=show_loop, **common),
        "export": lambda: _stages.do_export(run, recipe),
    }


def _ensure(stage: Stage, run: RunDir, recipe: Recipe, work: Callable[[], dict[str, Any]], progress: Progress) -> str:
    from slimecli.stage import ensure

    return "done" if ensure(stage, run, recipe, work, progress.stage) else "skipped"


def refuse_mixing(run: RunDir, recipe: Recipe) -> None:
    """Trained steps belong to the data, model and SFT that they started from, and are not made again."""
    from slimecli.commands import _stages
    from slimecli.pipeline import PIPELINE
    from slimecli.stage import why_new

    changed = [n for n in ("data", "model", "sft") if "changed" in why_new(PIPELINE[n], run, recipe)]
    if run.checkpoints() and changed:
        raise UsageError(
            f"run {run.name} has {run.last_checkpoint()} trained steps that were made with another `{changed[0]}`"
            + " (its optimizer is that of [trainer])" * (changed[0] == "sft"),
            "start a new run under another --run name; mixing the two would be silent nonsense",
        )
    if PIPELINE["loop"].wanted(recipe):
        _stages.refuse_nothing(run, recipe)


def open_or_create(
    name: str, recipe_name: str, model: str, overrides: tuple[str, ...], *, resume: bool, overwrite: bool
) -> tuple[RunDir, Recipe, str]:
    """(run, recipe to work with, why it differs from the stored one); all recipe errors are told at once."""
    from slimecli.plan import check_recipe
    from slimecli.recipe import load_recipe, override_recipe, recipe_path
    from slimecli.rundir import create_run, open_run

    if resume:
        if recipe_name or model:
            raise UsageError("--resume goes on with the run's own recipe", "change single values with --set")
        if not name:
            raise UsageError("which run?", "slime run --resume --run NAME; `slime runs` lists them")
        run = open_run(name)
        old = run.recipe()
        recipe = override_recipe(old, overrides)
        check_recipe(recipe, run)
        return run, recipe, " ".join(f"--set {o}" for o in overrides) if recipe != old else ""
    if not recipe_name and not model:
        raise UsageError("which recipe?", "slime run --recipe quickstart; `slime recipes` lists them")
    recipe = load_recipe(recipe_name, overrides, model)
    check_recipe(recipe, None)
    text = recipe_path(recipe_name).read_text(encoding="utf-8") if recipe_name else ""
    return create_run(name, recipe, text, overwrite=overwrite), recipe, ""


def cli(
    recipe: RecipeOpt = "",
    run: RunOpt = "",
    model: ModelOpt = "",
    set_: SetOpt = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run where it stopped")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="delete a run of that name first")] = False,
    until: Annotated[str, typer.Option("--until", metavar="STAGE", help="stop after this stage")] = "",
    json_: JsonOpt = False,
    megatron: MegatronArgs = None,
) -> None:
    """Do every stage in order: data, model, SFT, the RL loop on Ray, export."""
    from pathlib import Path

    from slimecli import console
    from slimecli.flags import megatron_overrides
    from slimecli.observe.display import Progress
    from slimecli.observe.summary import show_summary
    from slimecli.pipeline import PIPELINE

    overrides = (*(set_ or ()), *megatron_overrides(megatron or ()))
    name = run or ("" if resume else Path(recipe).stem or "run")
    target, resolved, change = open_or_create(name, recipe, model, overrides, resume=resume, overwrite=overwrite)
    stages = [s.name for s in PIPELINE.values() if s.wanted(resolved)]
    with Progress(target, resolved, stages) as progress:
        try:
            result = run_pipeline(target, resolved, progress, until=until, change=change)
        except SlimeError as error:
            progress.close()
            again = f"slime run --resume --run {target.quoted}"
            if isinstance(error, InterruptedRunError):
                raise InterruptedRunError(error.what, f"continue with: {again}") from None
            if target.is_locked():  # another is at work there, and nothing is to be mended
                raise
            console.hint(again, "once it is mended; if a value of the recipe is wrong, add --set KEY=VALUE")
            raise
    if set(result["stages"].values()) == {"skipped"}:
        raise _nothing_to_do(target, resolved)
    show_summary(target)
    if json_:
        console.emit(result)


def _nothing_to_do(run: RunDir, recipe: Recipe) -> UsageError:
    from slimecli.pipeline import PIPELINE
    from slimecli.stage import why_new

    left = [s.name for s in PIPELINE.values() if s.wanted(recipe) and why_new(s, run, recipe)]
    if left:
        return UsageError(
            f"there was nothing to do up to that stage; run {run.name} still lacks {', '.join(left)}",
            f"slime run --resume --run {run.quoted}",
        )
    return UsageError(
        f"run {run.name} is complete ({recipe.steps} of {recipe.steps} steps): there was nothing to do",
        f"to train further: slime run --resume --run {run.quoted} --set steps={recipe.steps * 2}",
    )
