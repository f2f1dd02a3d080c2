"""Publishing: the weights of a step go from the trainer to every engine, and are seen to have arrived."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

from slimecli.cluster import sync_kind
from slimecli.protocols import RolloutEngine, Trainer
from slimecli.serving.live_collect import NoEngine
from slimecli.sync.push import deliver
from slimecli.sync.report import note_sync, sync_metrics

if TYPE_CHECKING:
    from slimecli.session import Session


def publish(session: Session, trainer: Trainer, engine: RolloutEngine, version: int) -> dict[str, Any]:
    """Stage on the trainer's side, push to every engine, compare fingerprints."""
    if isinstance(engine, NoEngine):
        return fingerprint(session, trainer, version)
    kind = sync_kind(session.recipe, session.backend)
    folder = session.run.sync_dir
    staged = session.cluster.stage(trainer, kind, version, folder, session.run.model_dir)
    begin, limit = time.perf_counter(), session.recipe.sync.timeout_s
    receipts = session.aio.run(deliver(engine, staged, limit, running=session.recipe.running_requests))
    note_sync(session.clock, staged, receipts, time.perf_counter() - begin)
    if kind == "disk":
        shutil.rmtree(folder, ignore_errors=True)
    return sync_metrics(staged)


def fingerprint(session: Session, trainer: Trainer, version: int) -> dict[str, Any]:
    """What publish would report, where no engine is held."""
    staged = session.cluster.stage(trainer, "in_process", version, session.run.root, session.run.model_dir)
    return sync_metrics(staged)
