"""Frozen models that a run loads itself: a teacher beside the trainer, and those served beside the policy.

Each is an HF folder, read where it lies, or a Megatron checkpoint (torch_dist): the run then keeps a copy in HF form.
The copy is made once: a checkpoint that changes later, or is gone, is not part of the run.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote as quote_word
from urllib.parse import quote

from slimecli import files, headers
from slimecli.errors import MissingStageError
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir

TEACHER = "teacher"
"""role of distill.teacher"""


def served_role(name: str) -> str:
    """Role of a model in engine.models."""
    return f"served-{quote(name, safe='')}"


def frozen_paths(recipe: Recipe) -> dict[str, str]:
    """Role -> path as the recipe has it, of all frozen models that the RL loop loads."""
    if not recipe.steps:
        return {}
    teacher = {TEACHER: recipe.distill.teacher} if recipe.distill.teacher else {}
    return teacher | {served_role(model.name): model.path for model in recipe.engine.models}


def frozen_checkpoints(recipe: Recipe) -> dict[str, str]:
    """The same of those that are Megatron checkpoints, as far as they are there."""
    return {role: path for role, path in frozen_paths(recipe).items() if headers.is_torch_dist(Path(path).expanduser())}


def note_of(folder: Path) -> Path:
    """The file that says which checkpoint a copy is of."""
    return folder.with_name(f"{folder.name}.json")


def frozen_copy(run: RunDir, role: str, path: str) -> Path | None:
    """The run's whole copy of the checkpoint that is named so; None: it has none."""
    folder = run.frozen_dir(role)
    note = note_of(folder)
    is_of_it = note.is_file() and files.read_json(note)["path"] == path
    return folder if is_of_it and files.is_committed(folder) else None


def with_copies(recipe: Recipe, run: RunDir) -> Recipe:
    """The recipe with the run's copies in place of checkpoints, where there are any."""
    found = {
        role: str(copy)
        for role, path in frozen_paths(recipe).items()
        if not (Path(path).expanduser() / "config.json").is_file() and (copy := frozen_copy(run, role, path))
    }
    if not found:
        return recipe
    models = [m.model_copy(update={"path": found.get(served_role(m.name), m.path)}) for m in recipe.engine.models]
    teacher = found.get(TEACHER, recipe.distill.teacher)
    return recipe.model_copy(
        update={
            "distill": recipe.distill.model_copy(update={"teacher": teacher}),
            "engine": recipe.engine.model_copy(update={"models": models}),
        }
    )


def loadable(recipe: Recipe, run: RunDir) -> Recipe:
    """The recipe with folders that trainer and engines can load; MissingStageError where a copy was not made."""
    found = with_copies(recipe, run)
    for role, path in frozen_checkpoints(found).items():
        is_new = role == TEACHER and path != run.recipe().distill.teacher
        change = f" --set distill.teacher={quote_word(path)}" * is_new
        raise MissingStageError(
            f"run {run.name} has no copy in HF form of {path} ({role})",
            f"slime run --resume --run {run.quoted}{change} --until frozen",
        )
    return found
