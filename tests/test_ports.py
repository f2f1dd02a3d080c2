import socket

import pytest

from slimecli import ports
from slimecli.errors import SlimeError


def test_a_free_port_can_be_had_and_is_one_address_alone():
    host = "127.0.0.1"
    with ports.listen(host, ports.free_port(host)) as door:
        where, port, *_ = door.getsockname()
        assert where == host and port > 0
        with socket.create_connection((host, port), timeout=5):
            pass
        with pytest.raises(SlimeError, match=f"port {port} on {host} is in use"):
            ports.check_free(host, port)
    ports.check_free(host, port)
    ports.check_free(host, 0)


def test_an_address_of_another_machine():
    with pytest.raises(SlimeError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ports.check_free("192.0.2.1", 0)
    with pytest.raises(SlimeError, match=r"cannot listen on 192\.0\.2\.1"):
        ports.free_port("192.0.2.1")


def test_a_free_port_is_none_that_connections_are_given():
    port = ports.free_port()
    assert port in ports.LASTING
    with ports.listen("127.0.0.1", port):
        assert ports.free_port() != port


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with ports.listen("127.0.0.1", ports.free_port()) as door:
        taken = door.getsockname()[1]
        free = ports.free_port()
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda self, among, count: [taken, free])
        assert ports.free_port() == free


def test_where_all_of_them_are_taken_any_other_is_given(monkeypatch):
    with ports.listen("127.0.0.1", ports.free_port()) as door:
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda self, among, count: [door.getsockname()[1]])
        port = ports.free_port()
        ports.check_free("127.0.0.1", port)
        assert port != door.getsockname()[1]
