"""What a weight sync says of itself: what every run repeats goes to the metrics, how it went to perf.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimecli.clock import Clock
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt


def sync_metrics(staged: StagedWeights) -> dict[str, Any]:
    """What was published: the same for every kind of sync, and after a resume."""
    return {
        "weights/fingerprint": staged.fingerprint,
        "weights/version": staged.update.version,
        "weights/bytes": staged.bytes_,
    }


def note_sync(clock: Clock, staged: StagedWeights, receipts: Sequence[WeightReceipt], push_s: float) -> None:
    """How it was published.

    `seconds/sync_pause` is of the engine that stood still longest; `sync/bytes` is what one engine read at most;
    `sync/full` counts engines that took all weights, `sync/unproven` those that named the version but cannot tell what
    they hold.
    """
    clock.add("sync_stage", staged.seconds)
    clock.add("sync_push", push_s)
    clock.add("sync_pause", max((r.pause_seconds for r in receipts), default=0.0))
    clock.note("sync/bytes", max((r.bytes_ for r in receipts), default=0))
    clock.note("sync/full", sum("full" in r.how for r in receipts))
    clock.note("sync/unproven", sum(not r.fingerprint for r in receipts))
    if staged.update.kind == "disk_delta":
        clock.note("sync/changed_fraction", staged.changed)
        clock.note("sync/bytes_written", staged.written)
