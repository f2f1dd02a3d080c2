"""A weight offer listens where its engines are, and nowhere else."""

import socket

import pytest
import torch

from slimecli.sync import distributed


def reachable(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("one_host", [True, False])
def test_nothing_listens_beyond_what_was_asked_for(one_host):
    outside = distributed._own_address()
    own = "127.0.0.1" if one_host else outside
    described = distributed.offer({"w": torch.ones(2)}, 3, one_host=one_host)
    store = distributed._control(described)
    try:
        assert described["master_address"] == own
        ports = [described["control_port"], described["master_port"]]
        assert all(reachable(own, port) for port in ports)
        for other in {"127.0.0.1", "127.0.0.2", outside} - {own}:
            assert not any(reachable(other, port) for port in ports), other
    finally:
        store.set("world", "0")  # the thread ends
