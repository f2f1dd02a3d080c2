"""The work behind each stage, shared by `slime run` and the commands that do one stage alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slimecli import console, files
from slimecli.errors import SlimeError, UsageError

if TYPE_CHECKING:
    from slimecli.cluster import Cluster
    from slimecli.loop import Parts
    from slimecli.recipe import Recipe
    from slimecli.recording import StepListener
    from slimecli.rundir import RunDir


def tell_backend(run: RunDir, recipe: Recipe) -> None:
    """What the training backend sets whatever the recipe leaves open, with the reasons."""
    if recipe.trainer.backend != "megatron":
        return
    from slimecli.plan_machine import runs_on_gpus, this_machine
    from slimecli.plan_megatron import decided_values
    from slimecli.plan_spec import model_spec

    on_gpu = runs_on_gpus(recipe, this_machine(run.root).gpus)
    for value in decided_values(recipe, model_spec(recipe, run), on_gpu=on_gpu):
        console.note(f"megatron: {value.name} = {value.value}  ({value.reason})")


def do_data(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """prepare-data into the run."""
    from slimecli.commands.prepare_data import prepare_run_data

    return prepare_run_data(run, recipe)


def do_model(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """The starting model as an HF folder in the run."""
    from slimecli.weights.source import materialise_model

    folder = materialise_model(recipe, run)
    return {"folder": str(folder), "sha256": files.sha256(folder / files.DONE)}


def do_frozen(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """Frozen models that are Megatron checkpoints as HF folders in the run."""
    from slimecli.weights.source import materialise_frozen

    return {role: str(folder) for role, folder in materialise_frozen(recipe, run).items()}


def do_sft(
    run: RunDir, recipe: Recipe, cluster: Cluster | None = None, on_step: StepListener | None = None, **kwargs: Any
) -> dict[str, Any]:
    """SFT as a run of its own inside the run, resumed where it stopped."""
    from slimecli.pipeline import sft_recipe
    from slimecli.rundir import RunDir, create_run
    from slimecli.session import Session

    recipe_sft = sft_recipe(recipe)
    inner = RunDir(run.sft_dir)
    if not inner.manifest_path.is_file() or inner.recipe() != recipe_sft:
        shutil.rmtree(inner.root, ignore_errors=True)
        inner = create_run(str(inner.root), recipe_sft)
    for name in ("model", "data"):  # each time: a kill may come between the manifest and the links
        if not (inner.root / name).is_symlink():
            (inner.root / name).symlink_to(os.path.relpath(run.root / name, inner.root))
    with inner.lock(), Session(inner, recipe_sft, on_step=on_step, shared_cluster=cluster) as session:
        inner.new_attempt()
        return run_steps(inner, recipe_sft, session.sft_parts, **kwargs)


def do_loop(
    run: RunDir, recipe: Recipe, cluster: Cluster | None = None, on_step: StepListener | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The RL loop from the newest checkpoint to the last step."""
    from slimecli.session import Session

    backend = recipe.cluster.backend
    with Session(run, recipe, backend, on_step=on_step, shared_cluster=cluster) as session:
        return run_steps(run, recipe, session.parts, **kwargs)


def run_steps(
    run: RunDir,
    recipe: Recipe,
    make_parts: Callable[[int], Parts],
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Forget what came after the newest checkpoint, then loop to the last step.

    Where a kill came after the last checkpoint and before the stage was noted as done, nothing is left to do.
    """
    from slimecli.loop import loop
    from slimecli.recording import last_stored

    start = run.last_checkpoint() or 0
    if start == recipe.steps and _is_trained_with(run, recipe, start):
        return {"steps": recipe.steps, "first": start + 1, "performed": 0}
    refuse_nothing(run, recipe)
    _tell_damaged(run, start)
    run.rewind(start if start else -1, samples_until=last_stored(run, start))
    parts = make_parts(start)
    parts.stop_requested = stop_requested
    loop(parts, start, recipe.steps)
    done = run.last_checkpoint() or 0
    if done != recipe.steps:
        raise SlimeError(f"planned {recipe.steps} steps, but the last checkpoint is of step {done}", "report this")
    return {"steps": recipe.steps, "first": start + 1, "performed": recipe.steps - start}


def _tell_damaged(run: RunDir, start: int) -> None:
    """That steps are made again since the checkpoints after `start` were damaged is nothing to find out from a log."""
    for step, what in run.damaged_checkpoints().items():
        if step > start:
            console.warn(f"the checkpoint of step {step} is damaged ({what}); going on from step {start}")


def refuse_nothing(run: RunDir, recipe: Recipe) -> None:
    """Say so where the steps are done already, but not with the values asked for now."""
    done = run.last_checkpoint() or 0
    if done > recipe.steps or (done == recipe.steps and not _is_trained_with(run, recipe, done)):
        raise UsageError(
            f"run {run.name} has done {done} of {recipe.steps} steps: there is nothing to train",
            f"to train further: slime run --resume --run {run.quoted} --set steps={done * 2}",
        )


def _is_trained_with(run: RunDir, recipe: Recipe, step: int) -> bool:
    """Whether the checkpoint of a step, and its weights, came from the training values of this recipe."""
    from slimecli.pipeline import training_inputs

    if step not in run.checkpoints():
        return False
    manifest = files.read_json(run.checkpoint_dir(step) / files.DONE)
    return files.is_committed(run.weights_dir(step)) and manifest.get("inputs") == training_inputs(recipe)


def do_export(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """The newest weights as an HF folder."""
    from slimecli.commands.export import export_checkpoint

    return {"folder": str(export_checkpoint(run, None))}


def run_and_recipe(name: str, overrides: tuple[str, ...]) -> tuple[RunDir, Recipe]:
    """An existing run and its recipe with overrides for this command alone."""
    from slimecli.recipe import override_recipe
    from slimecli.rundir import open_run

    run = open_run(name)
    return run, override_recipe(run.recipe(), overrides)
