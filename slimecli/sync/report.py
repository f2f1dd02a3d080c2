"""What a weight sync says of itself: values that a repeated run repeats for metrics, times for perf.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt


def sync_metrics(staged: StagedWeights, receipts: Sequence[WeightReceipt]) -> dict[str, Any]:
    """For metrics: what was published, how much of it moved, and how many engines took all of it.

    `weights/unproven` counts engines that named the version but cannot tell what they hold.
    """
    values: dict[str, Any] = {
        "weights/fingerprint": staged.fingerprint,
        "weights/version": staged.update.version,
        "weights/bytes": staged.bytes_ if staged.written < 0 else staged.written,
    }
    if staged.update.kind == "disk_delta":
        values["weights/changed_fraction"] = staged.changed
        values["weights/full_syncs"] = sum(r.how.startswith("full") for r in receipts)
    if unproven := sum(not r.fingerprint for r in receipts):
        values["weights/unproven"] = unproven
    return values


def sync_times(staged: StagedWeights, receipts: Sequence[WeightReceipt], push_s: float) -> dict[str, float]:
    """For perf.jsonl, in seconds: staging, pushing, and how long the engine that waited longest stood still."""
    pause = max((r.pause_seconds for r in receipts), default=0.0)
    return {"sync_stage": staged.seconds, "sync_push": push_s, "sync_pause": pause}
