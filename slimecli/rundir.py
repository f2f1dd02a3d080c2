"""The run directory: the only module that joins its paths.

Layout: docs/run-directory.md. What is written here is either whole or absent (slimecli.files).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli import __version__, env, files
from slimecli.errors import DataError, MissingStageError, SlimeError, UsageError
from slimecli.recipe import Recipe, lost_recipe_fix, validate_recipe
from slimecli.samples import decode_samples, encode_samples
from slimecli.types import Group

_STEP = re.compile(r"step_(\d{6})")
_VERSION = re.compile(r"v(\d{6})")
_LEFTOVER = re.compile(r"\..+\.(\d+)\.(tmp|old)")
"""temporary names of slimecli.files, as a kill leaves them"""


@dataclass(frozen=True)
class RunDir:
    """One run on disk. Construct with `open_run` or `create_run`."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.root.name

    @property
    def quoted(self) -> str:
        """The folder as it is typed in a shell."""
        return shlex.quote(str(self.root))

    @property
    def manifest_path(self) -> Path:
        return self.root / "run.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per step; deterministic values only."""
        return self.root / "metrics.jsonl"

    @property
    def perf_path(self) -> Path:
        """One JSON object per step: seconds, tokens/s, memory. Kept apart so that metrics.jsonl is reproducible."""
        return self.root / "perf.jsonl"

    @property
    def verdicts_path(self) -> Path:
        """One JSON object per broken gate."""
        return self.root / "verdicts.jsonl"

    @property
    def error_path(self) -> Path:
        return self.root / "error.json"

    @property
    def model_dir(self) -> Path:
        """HF folder of the starting model."""
        return self.root / "model" / "hf"

    def frozen_dir(self, role: str) -> Path:
        """HF folder of a frozen model that came as a Megatron checkpoint; beside it ROLE.json, which one."""
        return self.root / "model" / role

    @property
    def data_dir(self) -> Path:
        """Committed by prepare-data: train.jsonl, holdout.jsonl, sft.jsonl, report in DONE.json."""
        return self.root / "data"

    @property
    def sft_dir(self) -> Path:
        """The SFT stage is a run of its own, in the same layout."""
        return self.root / "sft"

    @property
    def export_dir(self) -> Path:
        return self.root / "export"

    @property
    def report_path(self) -> Path:
        """What `slime report` writes."""
        return self.root / "report.html"

    @property
    def tensorboard_dir(self) -> Path:
        return self.root / "tensorboard"

    def stage_path(self, stage: str) -> Path:
        return self.root / "stages" / f"{stage}.json"

    def samples_path(self, step: int) -> Path:
        """Samples that step `step` (1-based) trains on."""
        return self.root / "rollouts" / f"step_{step:06d}.jsonl.zst"

    def data_state_path(self, step: int) -> Path:
        """Cursor and buffer of the data source after collecting for step `step`."""
        return self.root / "rollouts" / f"step_{step:06d}.state.json"

    def checkpoint_dir(self, step: int) -> Path:
        """Checkpoint after step `step`; step 0 is the start."""
        return self.root / "checkpoints" / f"step_{step:06d}"

    def weights_dir(self, version: int) -> Path:
        """HF folder of the weights after step `version`."""
        return self.root / "weights" / f"v{version:06d}"

    @property
    def sync_dir(self) -> Path:
        """Weights on their way to the engines, for sync.kind = disk; also names this run's shared memory."""
        return self.root / "sync"

    @property
    def live_dir(self) -> Path:
        """Served conversations, by `slime serve --record`: written and locked by the server alone."""
        return self.root / "live"

    def eval_path(self, step: int) -> Path:
        return self.root / "eval" / f"step_{step:06d}.json"

    def eval_steps(self) -> list[int]:
        """Steps that were evaluated, ascending."""
        found = [_STEP.match(p.name) for p in (self.root / "eval").glob("step_*.json")]
        return sorted(int(m.group(1)) for m in found if m)

    def log_path(self, name: str) -> Path:
        """Log file of one process in the current attempt."""
        return self.root / "logs" / "latest" / f"{name}.log"

    # -- recipe ------------------------------------------------------------------------------------------------------

    def recipe(self) -> Recipe:
        """The resolved recipe in force: the newest recipe.N.json."""
        path = self._recipe_files()[-1]
        try:
            return validate_recipe(files.read_json(path), source=str(path))
        except (FileNotFoundError, DataError) as error:
            what = error.what if isinstance(error, DataError) else f"{path} is gone"
            raise DataError(what, lost_recipe_fix(self._recipe_files(), self.manifest_path)) from None

    def _recipe_files(self) -> list[Path]:
        numbered = sorted(self.root.glob("recipe.*.json"), key=lambda p: int(p.name.split(".")[1]))
        return [self.root / "recipe.json", *numbered]

    def change_recipe(self, recipe: Recipe, why: str) -> None:
        """Store a recipe that differs from the one in force, beside it."""
        number = len(self._recipe_files()) + 1
        files.write_json(self.root / f"recipe.{number}.json", recipe.model_dump(mode="json"))
        manifest = files.read_json(self.manifest_path)
        manifest.setdefault("recipe_changes", []).append({"file": f"recipe.{number}.json", "why": why})
        files.write_json(self.manifest_path, manifest)

    # -- steps -------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return self._committed_steps(self.root / "checkpoints")

    def last_checkpoint(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return self.checkpoints()[-1] if self.checkpoints() else None

    def damaged_checkpoints(self) -> dict[int, str]:
        """Steps whose checkpoint was complete once and is not any more -> what has happened to it."""
        found = [(m, p) for p in (self.root / "checkpoints").glob("step_*") if (m := _STEP.fullmatch(p.name))]
        return {int(m.group(1)): told for m, p in sorted(found, key=lambda f: f[1]) if (told := files.damage(p))}

    def rollout_steps(self) -> list[int]:
        """Steps whose samples are on disk, ascending."""
        found = [_STEP.match(p.name) for p in (self.root / "rollouts").glob("step_*.jsonl.zst")]
        return sorted(int(m.group(1)) for m in found if m)

    @staticmethod
    def _committed_steps(folder: Path) -> list[int]:
        found = [(m, p) for p in folder.glob("step_*") if (m := _STEP.fullmatch(p.name))]
        return sorted(int(m.group(1)) for m, p in found if files.is_committed(p))

    def prune_checkpoints(self, keep: int) -> list[int]:
        """Delete all but the newest `keep` complete checkpoints (0: none is deleted), and weights without one."""
        steps = self.checkpoints()
        gone = steps[:-keep] if keep else []
        for step in gone:
            (self.checkpoint_dir(step) / files.DONE).unlink()
            shutil.rmtree(self.checkpoint_dir(step))
        if keep:
            self._drop_weights(lambda version: version not in steps[-keep:])
        return gone

    def weight_versions(self) -> list[int]:
        """Steps whose weights are committed, ascending."""
        found = [(m, p) for p in (self.root / "weights").glob("v*") if (m := _VERSION.fullmatch(p.name))]
        return sorted(int(m[1]) for m, p in found if (p / files.DONE).is_file())

    def _drop_weights(self, is_gone: Callable[[int], bool]) -> None:
        for folder in (self.root / "weights").glob("v*"):
            match = _VERSION.fullmatch(folder.name)
            if match and is_gone(int(match.group(1))):
                shutil.rmtree(folder)

    # -- samples -----------------------------------------------------------------------------------------------------

    def write_samples(self, step: int, groups: list[Group]) -> None:
        """Commit the samples of a step."""
        files.write_bytes(self.samples_path(step), encode_samples(groups))

    def read_samples(self, step: int) -> list[Group]:
        """Samples of a step, in groups, in order."""
        path = self.samples_path(step)
        if not path.is_file():
            raise MissingStageError(
                f"run {self.name} has no samples for step {step}", f"slime rollout --run {self.quoted}"
            )
        return decode_samples(path.read_bytes(), str(path))

    # -- metrics -----------------------------------------------------------------------------------------------------

    def append(self, path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
        """Append one JSON line; `durable` waits until it is on the disk."""
        is_new = not path.exists()
        with files.explain_disk_errors(path), path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record, sort_keys=True) + "\n")
            if durable:
                handle.flush()
                os.fsync(handle.fileno())
        if is_new:
            files.sync_folder(path.parent)

    def read_records(self, path: Path) -> list[dict[str, Any]]:
        """Whole lines of a JSONL file; a torn last line, as a crash leaves it, is not there."""
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line]

    def rewind(self, step: int, *, samples_until: int | None = None) -> None:
        """Forget everything after `step` (-1: step 0 as well): what a resume is about to do again.

        Args:
            samples_until: last step whose samples stay, where they have been collected and wait to be trained on.
        """
        for path in (self.metrics_path, self.perf_path, self.verdicts_path):
            if path.is_file():
                kept = [r for r in self.read_records(path) if r["step"] <= step]
                files.write_text(path, "".join(json.dumps(r, sort_keys=True) + "\n" for r in kept))
        last = {"rollouts": step if samples_until is None else samples_until, "eval": step}
        for name, limit in last.items():
            for path in (self.root / name).glob("step_*"):
                match = _STEP.match(path.name)
                if match and int(match.group(1)) > limit:
                    path.unlink()
        self._drop_weights(lambda version: version > step)

    def _drop_leftovers(self) -> None:
        """Remove what a killed writer was in the middle of writing; `slime eval` may be alive and writing one file."""
        for path in [*self.root.glob(".*"), *self.root.glob("*/.*")]:
            match = _LEFTOVER.fullmatch(path.name)
            if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # -- ownership ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer of this run; released by the kernel even after kill -9."""
        path = self.root / ".lock"
        with files.explain_disk_errors(path):
            opened = path.open("a+", encoding="utf-8")
        with opened as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise SlimeError(
                    f"run {self.name} is in use by {handle.read().strip() or 'another process'}",
                    "wait for it, stop it, or use another --run name",
                ) from None
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            try:
                yield
            finally:
                handle.truncate(0)

    def is_locked(self) -> bool:
        """True while a writer works on this run.

        The owner named in the file is looked at first: taking the lock, even for a moment, could turn a starting
        writer away, so that is tried only against an owner that seems alive (its process number may be reused).
        """
        path = self.root / ".lock"
        owner = re.fullmatch(r"process (\d+) on (.+)", path.read_text(encoding="utf-8")) if path.is_file() else None
        if owner is None:
            return False
        if owner.group(2) == socket.gethostname():
            try:
                os.kill(int(owner.group(1)), 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
        with path.open("r", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def new_attempt(self) -> Path:
        """Make logs/attempt_NNN, point logs/latest at it, and clear away what a killed attempt left half written."""
        self._drop_leftovers()
        logs = self.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.name[8:]) for p in logs.glob("attempt_*")]
        folder = logs / f"attempt_{max(numbers, default=0) + 1:03d}"
        folder.mkdir()
        link = logs / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(logs / "latest")
        return folder


def run_path(name: str) -> Path:
    """Folder for a run name or path: a bare name lies under SLIME_RUNS (default ./runs)."""
    longest = max((len(os.fsencode(part)) for part in Path(name).parts), default=0)
    if longest > 255:
        raise UsageError(f"the run name is too long: {longest} bytes, file systems take 255", "--run SHORTER-NAME")
    return Path(name) if "/" in name or name in (".", "..") else env.runs_root() / name


def is_run(name: str) -> bool:
    """Whether there is a run of this name or path."""
    return (run_path(name) / "run.json").is_file()


def open_run(name: str) -> RunDir:
    """An existing run."""
    if is_run(name):
        return RunDir(run_path(name))
    raise UsageError(f"no run at {run_path(name)}", "`slime runs` lists all; `slime run --recipe quickstart` makes one")


def create_run(name: str, recipe: Recipe, recipe_text: str = "", *, overwrite: bool = False) -> RunDir:
    """A new run directory with its recipe. An existing one is refused unless `overwrite` moves it aside."""
    root = run_path(name)
    if root.exists() and not _is_half_created(root):
        if not (root / "run.json").is_file():
            raise UsageError(f"{root} exists and is not a run directory", "choose another --run name")
        if not overwrite:
            raise UsageError(
                f"run {root.name} exists already", f"continue it with --resume, or start anew with --overwrite ({root})"
            )
        with RunDir(root).lock():
            shutil.rmtree(root)
    run = RunDir(root)
    with files.explain_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    files.write_text(root / "recipe.toml", recipe_text or "# defaults\n")
    files.write_text(root / "recipe.json", recipe.to_json())
    files.write_json(
        run.manifest_path,
        {
            "slime": __version__,
            "python": sys.version.split()[0],
            "host": socket.gethostname(),
            "argv": sys.argv,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "title": recipe.title,
        },
    )
    return run


def _is_half_created(root: Path) -> bool:
    """True for an empty folder, and for what `create_run` leaves when it is killed before run.json."""
    return all(p.name in ("recipe.toml", "recipe.json") or _LEFTOVER.fullmatch(p.name) for p in root.iterdir())


def list_runs() -> list[RunDir]:
    """All runs under SLIME_RUNS, oldest first."""
    found = env.runs_root().glob("*/run.json")
    return [RunDir(p.parent) for p in sorted(found, key=lambda p: p.stat().st_mtime)]
