"""A run that names no cluster has one of its own, whatever else runs on the machine."""

import pytest

from slimecli.ports import free_port
from tests.forked import spawn_slime, succeed
from tests.tiny_run import sets


@pytest.mark.ray
def test_no_cluster_is_joined_that_was_not_named(tmp_path, monkeypatch):
    """Ray by itself would look for one: in this variable, and in a file that `ray start` leaves."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    words = sets("steps=1", "sft.steps=1", "sft.warmup_steps=0", "trainer.warmup_steps=0", "cluster.backend='ray'")
    succeed("run", "--recipe", "quickstart", "--until", "sft", *words, folder=tmp_path, run=spawn_slime)
