"""Engines of a joined cluster listen where other machines reach them, and nowhere else; a cluster must be there."""

import socket
import time

import pytest
import ray

from slimecli.cluster import open_cluster
from slimecli.cluster.actors import reachable
from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir


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


@pytest.mark.parametrize(("address", "why"), [("127.0.0.1:{}", "refused"), ("10.0.0.1", "HOST:PORT")])
def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path, monkeypatch, address, why):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        address = address.format(held.getsockname()[1])
        recipe = load_recipe("", (f"cluster.address='{address}'",))
        start = time.monotonic()
        with pytest.raises(SlimeError, match=why) as caught:
            open_cluster("ray", recipe, RunDir(tmp_path))
    assert time.monotonic() - start < 3, "Ray would try for minutes"
    assert address in caught.value.what and "ray status" in (caught.value.fix or "")
