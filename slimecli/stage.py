"""Stages and the rule when one is done anew.

A stage is new when its declared inputs or its upstream stages are new, or its outputs are gone; never because code
changed. `force` does it anyway. The reason is always told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.errors import InterruptedRunError, MissingStageError, SlimeError
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One link of the pipeline."""

    name: str
    needs: tuple[str, ...] = ()
    """stages that must be done before"""
    inputs: Callable[[Recipe], Any]
    """the part of the recipe the result depends on, JSON-ready"""
    outputs: Callable[[RunDir, Recipe], list[Path]]
    """committed folders or files that exist when it is done"""
    wanted: Callable[[Recipe], bool] = lambda recipe: True
    """whether this recipe has the stage at all"""
    command: Callable[[RunDir], str]
    """what a person would type to do just this stage"""


def fingerprint(stage: Stage, run: RunDir, recipe: Recipe) -> str:
    """Hash of the declared inputs and of what the upstream stages were made from.

    Of a file the name counts: the run holds its own copy of the data, and a file that changes later is not part of it.
    """
    upstream = {name: _record(run, name).get("fingerprint", "") for name in stage.needs}
    text = json.dumps([stage.name, stage.inputs(recipe), upstream], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _record(run: RunDir, name: str) -> dict[str, Any]:
    path = run.stage_path(name)
    record: dict[str, Any] = files.read_json(path) if path.is_file() else {}
    return record


def why_new(stage: Stage, run: RunDir, recipe: Recipe) -> str:
    """Why the stage has to be done, or an empty string when it is done already."""
    record = _record(run, stage.name)
    if record.get("status") != "done":
        return f"was {record['status']}" if record else "not done yet"
    if record["fingerprint"] != fingerprint(stage, run, recipe):
        return "its inputs have changed"
    gone = [p for p in stage.outputs(run, recipe) if not _exists(p)]
    return f"{gone[0]} is gone" if gone else ""


def _exists(path: Path) -> bool:
    return files.is_committed(path) if path.is_dir() else path.is_file()


def require(stages: dict[str, Stage], name: str, run: RunDir, recipe: Recipe) -> None:
    """Raise MissingStageError, with the command to type, unless everything stage `name` needs is done."""
    for needed in stages[name].needs:
        stage = stages[needed]
        if stage.wanted(recipe) and _record(run, needed).get("status") != "done":
            raise MissingStageError(f"`{name}` needs the stage `{needed}` of run {run.name}", stage.command(run))


def ensure(
    stage: Stage, run: RunDir, recipe: Recipe, work: Callable[[], dict[str, Any]], tell: Callable[[str, str, str], None]
) -> bool:
    """Do the stage if it is new. True if work was done.

    Args:
        work: does it and returns what is worth storing about the result.
        tell: (stage, state, detail) for the person watching.
    """
    reason = why_new(stage, run, recipe)
    if not reason:
        tell(stage.name, "skipped", "nothing changed")
        return False
    tell(stage.name, "running", reason)
    start = time.perf_counter()
    record: dict[str, Any] = {
        "stage": stage.name,
        "fingerprint": fingerprint(stage, run, recipe),
        "argv": sys.argv,
        "host": socket.gethostname(),
        "reason": reason,
        "command": stage.command(run),
    }
    files.write_json(run.stage_path(stage.name), {**record, "status": "running"})
    try:
        record["result"] = work()
        missing = [p for p in stage.outputs(run, recipe) if not _exists(p)]
        if missing:
            raise SlimeError(f"stage {stage.name} ended without its output {missing[0]}", "report this as a bug")
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt | InterruptedRunError) else "failed"
        seconds = time.perf_counter() - start
        with contextlib.suppress(SlimeError):  # a full disk must not hide why the stage ended
            files.write_json(run.stage_path(stage.name), {**record, "status": status, "seconds": seconds})
        raise
    record |= {"status": "done", "seconds": time.perf_counter() - start}
    record["outputs"] = {str(p): _describe(p) for p in stage.outputs(run, recipe)}
    files.write_json(run.stage_path(stage.name), record)
    tell(stage.name, "done", f"{record['seconds']:.1f} s")
    return True


def _describe(path: Path) -> str:
    """Hash of a small output; of a folder, the hash of its manifest, which lists every file."""
    return files.sha256(path / files.DONE) if path.is_dir() else files.sha256(path)
