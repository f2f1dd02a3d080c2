"""`slime serve --follow RUN`: engines take the weights that a run commits, while they go on answering.

A folder of weights may be pruned by its run at any moment. So it is linked first: the links stay whole whatever the run
does, and are removed once every engine holds what they lead to. Never an older version follows a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shutil
import socket
import time
from pathlib import Path

from slimecli import console, files
from slimecli.engines.embedded.weights import FolderWeights
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.rundir import RunDir
from slimecli.serving.fleet import Fleet, versions_of
from slimecli.weights.fingerprint import fingerprint

LOOK_S = 0.3
"""time between two looks at the run (seconds)"""
RETRY_S = 5.0
"""after an update that failed (seconds)"""


class Follower:
    """Brings new weights of a run to a fleet.

    Args:
        run: looked at only.
        version: step of the run whose weights the engines hold; -1: they hold those of something else.
        timeout_s: deadline of one update (seconds).
    """

    def __init__(self, run: RunDir, fleet: Fleet, *, version: int, timeout_s: float) -> None:
        self._run = run
        self._fleet = fleet
        self._timeout_s = timeout_s
        self.version = version
        self._stamp = _stamp(run.weights_dir(version))
        # no name that the run removes once it knows no such process: this one may be of another machine
        self._links = run.live_dir / f".follow.{socket.gethostname()}.{os.getpid()}.links"
        self._drop_abandoned()
        self._kept: Path | None = None
        self._unfit: dict[int, tuple[int, int]] = {}
        """version -> the commit of it that was left out"""
        self._told = ""
        self.updates = 0

    def _drop_abandoned(self) -> None:
        """What servers of this machine left that were killed: their links keep weights on the disk that are pruned."""
        for path in self._links.parent.glob(f".follow.{glob.escape(socket.gethostname())}.*.links"):
            pid = path.name.removesuffix(".links").rpartition(".")[2]
            if pid.isdigit() and not files.is_alive(int(pid)):
                shutil.rmtree(path, ignore_errors=True)

    async def watch(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                    self._told = ""
                    await asyncio.sleep(LOOK_S)
                except (SlimeError, OSError) as error:
                    self._tell(error.what if isinstance(error, SlimeError) else str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            shutil.rmtree(self._links, ignore_errors=True)

    def _tell(self, what: str) -> None:
        """Say what keeps going wrong, once."""
        if what != self._told:
            self._told = what
            held = f"step {self.version}" if self.version >= 0 else "what was served"
            console.warn(f"run {self._run.name}: {what}; {held} is served on, trying again every {RETRY_S:g} s")

    async def look(self) -> bool:
        """Take the newest whole weights if they are newer than what is held; True if so.

        A run that was resumed from before them may commit the same version again, with other weights: these count too.
        """
        if not self._run.root.is_dir():
            raise SlimeError(f"{self._run.root} is gone")
        for version in reversed(self._run.weight_versions()):
            stamp = _stamp(self._run.weights_dir(version))
            if version < self.version or (version == self.version and stamp == self._stamp):
                return False
            if stamp is None or self._unfit.get(version) == stamp:
                continue
            folder = await self._checked(version)
            if folder is None:
                self._unfit[version] = stamp
                continue
            await self._update(folder, version)
            self.version, self._stamp = version, stamp
            return True
        return False

    async def _checked(self, version: int) -> Path | None:
        """The linked folder of a version whose weights are what its DONE.json says; None: it is left out.

        This comes before any engine is touched: they go on with the weights that they have.
        """
        folder = self._linked(version)
        if folder is None:
            console.warn(f"weights of step {version} are not whole, or were pruned meanwhile: left out")
            return None
        expected = _stated(folder)
        try:
            found = await asyncio.to_thread(lambda: fingerprint(FolderWeights(folder).tensors())) if expected else ""
        except SlimeError as error:
            console.warn(f"weights of step {version} cannot be read and are left out: {error.what}")
        else:
            if found == expected:
                return folder
            console.warn(f"weights of step {version} have fingerprint {found}, not {expected}: damaged, left out")
        shutil.rmtree(folder)
        return None

    async def _update(self, folder: Path, version: int) -> None:
        begin = time.monotonic()
        expected = _stated(folder)
        update = WeightUpdate(kind="disk", version=version, folder=folder, in_flight=True)
        try:
            receipts = await asyncio.wait_for(self._fleet.update(update), self._timeout_s)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)  # it is linked anew for the next try
            if not isinstance(error, TimeoutError):
                raise
            raise SlimeError(
                f"the update to step {version} took longer than {self._timeout_s:g} s (sync.timeout_s)"
            ) from None
        before, self._kept = self._kept, folder  # an engine that is replaced later is given the newest again
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        wrong = [r for r in receipts if r.version != version or (r.fingerprint and r.fingerprint != expected)]
        if wrong:
            raise SlimeError(f"engines hold {versions_of(wrong)}, not {version}/{expected}", "restart the server")
        self.updates += 1
        console.say(
            f"serving the weights of step {version} ({time.monotonic() - begin:.2f} s, fingerprint "
            f"{expected[:12] or 'not stated'})"
        )

    def _linked(self, version: int) -> Path | None:
        """The folder of a version under a name that is ours; None if it was pruned meanwhile."""
        source, target = self._run.weights_dir(version), self._links / f"v{version:06d}.{time.monotonic_ns()}"
        target.mkdir(parents=True)
        try:
            for path in source.rglob("*"):
                if path.is_file():
                    place = target / path.relative_to(source)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _link(path, place)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)  # or each further try would fill a disk that is full
            if not isinstance(error, FileNotFoundError):
                raise
            return None
        if not files.is_committed(target):
            shutil.rmtree(target)
            return None
        return target


def _stated(folder: Path) -> str:
    """The fingerprint in a folder's DONE.json; empty: it states none."""
    return str(files.read_json(folder / files.DONE).get("fingerprint") or "")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except (PermissionError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        shutil.copyfile(source, target)  # a file system without links


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Tells one commit of a folder from the next; None: it is not there."""
    with contextlib.suppress(FileNotFoundError):
        found = (folder / files.DONE).stat()
        return found.st_mtime_ns, found.st_ino
    return None
