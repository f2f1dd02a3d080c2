"""Engines of a joined cluster listen where other machines reach them, and nowhere else."""

import pytest
import ray

from slimecli.cluster.actors import reachable
from slimecli.recipe import load_recipe


@pytest.mark.parametrize(
    ("overrides", "host"),
    [
        ((), "127.0.0.1"),
        (("cluster.address=10.0.0.1:6379",), "10.0.0.7"),
        (("cluster.address=10.0.0.1:6379", "engine.host=10.1.0.7"), "10.1.0.7"),
    ],
)
def test_the_address_an_engine_binds_to(monkeypatch, overrides, host):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    assert reachable(load_recipe("", overrides)).engine.host == host
