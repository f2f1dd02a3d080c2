"""Publishing: the weights of a step go from the trainer to every engine, and are seen to have arrived."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli.cluster import sync_kind
from slimecli.engines.supervisor import SupervisedPool
from slimecli.protocols import RolloutEngine, Trainer, WeightUpdate
from slimecli.serving.live_collect import NoEngine
from slimecli.sync.delivery import Delivery
from slimecli.sync.report import note_sync, sync_metrics
from slimecli.sync.stage import StagedWeights

if TYPE_CHECKING:
    from slimecli.session import Session


def publish(session: Session, trainer: Trainer, engine: RolloutEngine, version: int) -> dict[str, Any]:
    """Stage on the trainer's side, push to every engine, compare fingerprints."""
    if isinstance(engine, NoEngine):
        return fingerprint(session, trainer, version)
    kind, limit = sync_kind(session.recipe, session.backend), session.recipe.sync.timeout_s
    delivery = Delivery(session.cluster.stage, kind, session.run.sync_dir, session.run.model_dir, limit)
    if isinstance(engine, SupervisedPool):
        engine.count = session.clock.count
    done = delivery.publish(trainer, engine, version, session.aio.run, running=session.recipe.running_requests)
    note_sync(session.clock, done.staged, done.receipts, done.seconds)
    return sync_metrics(done.staged)


def fingerprint(session: Session, trainer: Trainer, version: int) -> dict[str, Any]:
    """What publish would report, where no engine is held."""
    staged = session.cluster.stage(trainer, "in_process", version, session.run.root, session.run.model_dir)
    return sync_metrics(staged)


async def load_folder(engine: RolloutEngine, version: int, folder: Path) -> None:
    """Have engines that nobody publishes to take weights from a folder; those that come back later take them too."""
    update = WeightUpdate(kind="disk", version=version, folder=folder)
    if not isinstance(engine, SupervisedPool):
        await engine.update_weights(update)
        return
    engine.version = version
    held = await engine.update_weights(update)
    staged = StagedWeights(update=update, fingerprint=held.fingerprint, digests={}, bytes_=held.bytes_, seconds=0.0)
    engine.current = lambda: staged
