"""What runs inside Ray's worker processes. Plain classes: `ray_cluster` turns them into actors."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slimecli import env
from slimecli.cluster.turns import Rests
from slimecli.errors import SlimeError
from slimecli.ports import listen
from slimecli.recipe import Recipe, validate_recipe

if TYPE_CHECKING:
    import numpy as np

    from slimecli.protocols import ModelName, SyncKind, Trainer
    from slimecli.sync.stage import StagedWeights
    from slimecli.types import StepStats


_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""what gloo and NCCL say to the ranks that are left"""


_MEETING = datetime.timedelta(minutes=30)
"""how long a rank waits for others at the store, as torch itself has it"""


def lost_peer(error: BaseException | None) -> bool:
    """True for the error of a rank that waited for one that is gone: a consequence, never the cause."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)


def _prepare_process(log: str, threads: int, gpus: Sequence[int], folder: str) -> None:
    """One log file per process, and thread count and GPUs before torch is imported. Without a log, output stays.

    Args:
        folder: the driver's current one, from which paths of the run and of the recipe count; empty: stay in this one.
    """
    import faulthandler

    if folder and Path(folder).is_dir():
        os.chdir(folder)
    elif folder and not Path(log).is_absolute():
        raise SlimeError(
            f"{socket.gethostname()} has no folder {folder}, in which the run is",
            "share that folder, or set SLIME_RUNS to one that every machine of the cluster has",
        )
    if log:
        handle = Path(log).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the process
        sys.stdout = sys.stderr = handle
        faulthandler.enable(handle)
    env.set_threads(threads)
    if gpus:
        env.set_visible_gpus(gpus)
    env.quiet_libraries()
    import torch

    torch.set_num_threads(threads)


def reachable(recipe: Recipe) -> Recipe:
    """The recipe of an engine that other machines of a joined cluster can talk to.

    Loopback would do for one machine only; the address by which the machine belongs to the cluster, and no other, takes
    its place.
    """
    import ray

    if not recipe.cluster.address or recipe.engine.host not in ("127.0.0.1", "localhost"):
        return recipe
    engine = recipe.engine.model_copy(update={"host": ray.util.get_node_ip_address()})
    return recipe.model_copy(update={"engine": engine})


class EngineHost:
    """One engine behind HTTP: the embedded one in this process, or an SGLang server (or a machine's share of one).

    Args:
        gpus: of this machine, which it may use.
        index: number of the engine among the run's.
        share: as in slimecli.engines.sglang.launch.start_server.
        folder: as in _prepare_process.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        model_dir: str,
        log: str,
        gpus: Sequence[int] = (),
        index: int = 0,
        share: tuple[int, int, str] | None = None,
        *,
        folder: str = "",
    ) -> None:
        resolved = reachable(validate_recipe(recipe))
        _prepare_process(log, resolved.engine.threads, gpus, folder)
        if resolved.engine.backend == "sglang":
            from slimecli.engines.sglang.launch import start_server

            server = start_server(resolved, Path(model_dir), log=Path(log), index=index, share=share)
            self._url, self._stop = server.url, server.close
            return
        from slimecli.engines import api_key, open_embedded
        from slimecli.engines.embedded.server import start_server_thread

        engine = open_embedded(resolved, Path(model_dir))
        self._url, self._stop = start_server_thread(engine, resolved.engine.host, 0, api_key=api_key(resolved))

    def url(self) -> str:
        """Where it listens; answered once the model is loaded."""
        return self._url

    def close(self) -> None:
        """Stop serving."""
        self._stop()


class TrainerHost:
    """One rank of the trainer."""

    def __init__(self, log: str, threads: int, gpus: Sequence[int] = (), *, folder: str = "") -> None:
        _prepare_process(log, threads, gpus, folder)
        self._trainer: Trainer | None = None
        self._one_host = False
        self._staged = -1
        """the last version"""
        self._has_gone_on = False
        """since then"""
        self._door: socket.socket | None = None

    def address(self, one_host: bool) -> tuple[str, int]:
        """(host, port) at which the ranks meet; asked of rank 0, which listens there from now on, and nowhere else.

        Args:
            one_host: no process of the run is on another machine.
        """
        host = "127.0.0.1"
        if not one_host:
            import ray

            host = str(ray.util.get_node_ip_address())
        self._door = listen(host)
        return host, int(self._door.getsockname()[1])

    def join(self, rank: int, world_size: int, host: str, port: int, local_rank: int) -> None:
        """Enter the process group."""
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it at run time only

        env.set_rendezvous(rank, world_size, host, port, local_rank)
        listening, self._door = self._door, None
        if world_size == 1 or torch.distributed.is_initialized():
            if listening is not None:
                listening.close()
            return
        if host == "127.0.0.1":
            env.set_gloo_loopback()
        # env:// would open a store that listens on all interfaces
        door = listening.detach() if listening is not None else None
        store = TCPStore(host, port, world_size, rank == 0, _MEETING, wait_for_workers=False, master_listen_fd=door)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    def open(self, recipe: dict[str, Any], model_dir: str, total_steps: int) -> None:
        """Open (or replace) the trainer."""
        from slimecli.trainers import open_trainer

        self.close()
        resolved = validate_recipe(recipe)
        self._one_host = resolved.is_one_host
        self._staged, self._has_gone_on = -1, False
        self._trainer = open_trainer(resolved, Path(model_dir), total_steps=total_steps)

    @property
    def _open(self) -> Trainer:
        assert self._trainer is not None, "open() comes first"
        return self._trainer

    def log_probs(self, batch: dict[str, np.ndarray], model: ModelName) -> np.ndarray:
        """Trainer.log_probs, over numpy."""
        from slimecli.batch import TrainBatch

        result: np.ndarray = self._open.log_probs(TrainBatch.from_numpy(batch), model=model).numpy()
        return result

    def step(self, batch: dict[str, np.ndarray]) -> StepStats:
        """Trainer.step, over numpy."""
        from slimecli.batch import TrainBatch

        self._has_gone_on = True
        return self._open.step(TrainBatch.from_numpy(batch))

    def stage(self, kind: SyncKind, version: int, folder: str, like: str) -> StagedWeights:
        """sync.stage.stage_weights over this trainer's weights.

        A version that was staged already, for an engine that comes late, is refused once there are other weights: they
        would count as published (`old_policy`), and are not what that engine needs.
        """
        from slimecli.sync.stage import stage_weights

        if self._has_gone_on and version <= self._staged:
            raise SlimeError(f"the trainer has gone on since version {version}", "the next version is for all")
        where = {"folder": Path(folder), "like": Path(like)}
        staged = stage_weights(self._open.weights(), kind, version=version, one_host=self._one_host, **where)
        self._staged, self._has_gone_on = version, False
        return staged

    def named_weights(self) -> list[tuple[str, np.ndarray]]:
        """Every weight as numpy; for small models and tests."""
        return [(name, tensor.float().cpu().numpy()) for name, tensor in self._open.weights()]

    def save(self, folder: str) -> None:
        """Trainer.save."""
        self._open.save(Path(folder))

    def load(self, folder: str) -> None:
        """Trainer.load."""
        self._open.load(Path(folder))

    def sleep(self) -> None:
        """Trainer.sleep."""
        cast(Rests, self._open).sleep()

    def wake(self) -> None:
        """Trainer.wake."""
        cast(Rests, self._open).wake()

    def close(self) -> None:
        """Trainer.close."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
