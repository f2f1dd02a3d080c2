"""docs/weight-sync.md names what there is."""

import re
from pathlib import Path
from typing import get_args

from slimecli.clock import Clock
from slimecli.protocols import SyncKind, WeightUpdate
from slimecli.recipe_engine import SyncSection
from slimecli.sync.chain import MOST
from slimecli.sync.report import note_sync, sync_metrics
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt

TEXT = (Path(__file__).parents[1] / "docs" / "weight-sync.md").read_text()


def first_column(heading):
    """Names in code type in the first column of the table whose header begins so."""
    table = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [name for row in table for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_kind_and_every_way_of_running_requests():
    assert first_column("`sync.kind`") == list(get_args(SyncKind))
    assert set(first_column("`sync.running`")) == set(get_args(SyncSection.model_fields["running"].annotation))
    assert f"are {MOST} or" in TEXT


def test_every_value_that_a_sync_reports():
    update = WeightUpdate(kind="disk_delta", version=3)
    staged = StagedWeights(update=update, fingerprint="f", digests={}, bytes_=9, seconds=0.5, written=4, changed=0.1)
    receipt = WeightReceipt(version=3, fingerprint="", seconds=0.2, bytes_=4, pause_seconds=0.1, how="full+changes")
    clock = Clock()
    note_sync(clock, staged, [receipt], 0.3)
    told = {name: value for name, value in clock.lap().items() if "sync" in name}
    assert set(told) == set(first_column("name"))
    assert told["seconds/sync_stage"] == 0.5 and told["seconds/sync_push"] == 0.3 and told["seconds/sync_pause"] == 0.1
    assert (told["sync/bytes"], told["sync/full"], told["sync/unproven"], told["sync/bytes_written"]) == (4, 1, 1, 4)
    for name in sync_metrics(staged):
        assert f"`{name}`" in TEXT
    assert not [name for name in clock.lap() if "sync" in name], "a step that publishes nothing reports nothing"
