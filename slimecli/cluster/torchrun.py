"""Trainer ranks as torchrun starts them, without Ray: rank 0 does the command, the others do what it says.

Rank 0 announces every call on the trainer in a process group of its own; all ranks make the call, and only rank 0
writes and prints. What another rank fails with, rank 0 raises: it is left in torchrun's store before that rank ends,
which closes its connections and so wakes a rank 0 that waits in a collective.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slimecli import env
from slimecli.cluster.actors import TrainerHost, lost_peer
from slimecli.cluster.local import LocalCluster
from slimecli.errors import ExitCode, SlimeError
from slimecli.protocols import ModelName, SyncKind, Trainer
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.sync.stage import StagedWeights
from slimecli.types import StepStats

if TYPE_CHECKING:
    import torch

    from slimecli.batch import TrainBatch

_PATIENCE = datetime.timedelta(days=1)
"""how long ranks wait for rank 0 to say something; a dead rank is noticed at once, whatever the deadline"""
_ERROR = "slime/error"


class _Ended(KeyboardInterrupt):
    """torchrun's SIGTERM: another rank has ended, or torchrun itself was told to stop."""


class TorchrunCluster(LocalCluster):
    """Rank 0's view: trainer calls go to all ranks; an engine, if any, is in this process."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        super().__init__(recipe, run)
        self._group: Ranks | None = None

    def open_trainer(self, recipe: Recipe, model_dir: Path, total_steps: int) -> Trainer:
        """The trainer of the recipe, on every rank."""
        self._check(recipe)
        if self._group is None:
            self._group = Ranks(self._run, recipe.trainer.threads)
        self._group.call("open", recipe.model_dump(mode="json"), str(model_dir), total_steps)
        return RanksTrainer(self._group)

    def stage(self, trainer: Trainer, kind: SyncKind, version: int, folder: Path, like: Path) -> StagedWeights:
        """Stage on every rank; rank 0 keeps the weights."""
        assert self._group is not None, "open_trainer comes first"
        staged: StagedWeights = self._group.call("stage", kind, version, str(folder), str(like))
        return staged

    def close(self) -> None:
        """Let the other ranks go. Idempotent."""
        if self._group is not None:
            self._group.end()
            self._group = None


class Ranks:
    """The process groups, and rank 0's own part of every call."""

    ended: ClassVar[bool] = False
    """the other ranks have been let go"""

    def __init__(self, run: RunDir, threads: int) -> None:
        signal.signal(signal.SIGTERM, _on_sigterm)
        self._control = _join(threads)
        self._host = TrainerHost("", threads)
        self._is_whole = True
        self._order = threading.Lock()
        """an engine that came back may ask for weights from a thread of its own: all do one thing after the other"""
        self._say("start", [str(run.log_path(f"trainer_{r}")) for r in range(env.distributed_rank()[1])], threads)

    def call(self, method: str, *args: Any) -> Any:
        """Make a call on every rank; rank 0's result. Raises the first rank's error that is known."""
        try:
            with self._order:
                self._say(method, *args)
                return getattr(self._host, method)(*args)
        except (Exception, KeyboardInterrupt) as error:
            if threading.current_thread() is threading.main_thread():  # no other may set handlers
                # this rank ends by itself, and has to say something first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._is_whole = False
            if lost_peer(error) or isinstance(error, _Ended):
                raise _error_of_others(f"the trainer was busy with `{method}`") from error
            raise

    def _say(self, *message: Any) -> None:
        _exchange(message, self._control)

    def end(self) -> None:
        """The last thing said; where a rank has failed there is nobody to say it to."""
        if self._is_whole:
            self._is_whole = False
            _say_end(self._control)


class RanksTrainer:
    """The Trainer protocol over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> torch.Tensor:
        """[T] log-probabilities."""
        import torch

        return torch.from_numpy(self._ranks.call("log_probs", batch.to_numpy(), model).copy())

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step on all ranks."""
        stats: StepStats = self._ranks.call("step", batch.to_numpy())
        return stats

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, from rank 0."""
        import torch

        for name, array in self._ranks.call("named_weights"):
            yield name, torch.from_numpy(array)

    def save(self, folder: Path) -> None:
        """Collective save."""
        self._ranks.call("save", str(folder))

    def load(self, folder: Path) -> None:
        """Collective load."""
        self._ranks.call("load", str(folder))

    def sleep(self) -> None:
        """Every rank gives up its device's memory."""
        self._ranks.call("sleep")

    def wake(self) -> None:
        """Every rank takes it back."""
        self._ranks.call("wake")

    def close(self) -> None:
        """Collective, unless a rank has failed."""
        if self._ranks._is_whole:
            self._ranks.call("close")


def _on_sigterm(number: int, frame: Any) -> None:
    raise _Ended


@contextlib.contextmanager
def leading() -> Iterator[None]:
    """Around rank 0's command: at its end the other ranks are let go, also where no trainer was needed."""
    yield
    if not Ranks.ended:
        _say_end(_join(1))


def follow() -> int:
    """Work for rank 0 until it says `end`; the exit code. What goes wrong is told by rank 0, not here."""
    # torchrun ends ranks by SIGTERM, and those in a collective see no handler; Ctrl-C is rank 0's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host: TrainerHost | None = None
    try:
        control = _join(1)
        while True:
            method, *args = _exchange(None, control)
            if method == "end":
                _let_go()
                return ExitCode.OK
            if method == "start":
                host = TrainerHost(args[0][env.distributed_rank()[0]], args[1])
                continue
            assert host is not None, "`start` comes first"
            getattr(host, method)(*args)
    except Exception as error:
        if host is not None:
            traceback.print_exc()  # into this rank's log file
        return _leave(error)


def _leave(error: Exception) -> int:
    """Leave what happened here for rank 0."""
    import torch.distributed as dist

    known = error if isinstance(error, SlimeError) else None
    code = known.exit_code if known else ExitCode.FAILED
    if not dist.is_initialized() or lost_peer(error):
        return code
    rank, store = dist.get_rank(), _store()
    what = known.what if known else f"{type(error).__name__}: {error}"
    fix = known.fix if known else f"see trainer_{rank}.log in logs/latest of the run"
    store.set(_ERROR, json.dumps({"rank": rank, "what": what, "fix": fix, "exit_code": int(code)}))
    return code


def _error_of_others(doing: str) -> SlimeError:
    """What rank 0 raises when a connection broke: the error of the rank that failed, if it left one."""
    store = _store()
    try:
        store.wait([_ERROR], datetime.timedelta(seconds=2))
    except RuntimeError:
        return SlimeError(
            f"a trainer process died while {doing}",
            "torchrun tells which one, below; the run is as after its last checkpoint: start the command again",
        )
    told = json.loads(store.get(_ERROR))
    error = SlimeError(f"trainer process {told['rank']}: {told['what']}", told["fix"])
    error.exit_code = ExitCode(told["exit_code"])
    return error


def _join(threads: int) -> Any:
    """Enter the process group of all ranks; returns another one, on the CPU, for what rank 0 says."""
    env.set_threads(threads)
    env.quiet_libraries()
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(env.local_rank() % torch.cuda.device_count())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


def _exchange(message: Any, control: Any) -> Any:
    """Rank 0's message, on every rank."""
    import torch
    import torch.distributed as dist

    box = [message]
    dist.broadcast_object_list(box, src=0, group=control, device=torch.device("cpu"))
    return box[0]


def _say_end(control: Any) -> None:
    Ranks.ended = True
    _exchange(("end",), control)
    _let_go()


def _let_go() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _store() -> Any:
    """torchrun's key-value store, which lives in torchrun itself and outlasts the ranks."""
    from torch._C._distributed_c10d import TCPStore

    host, port = env.rendezvous()
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=10))
