"""TCP ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from slimecli.errors import SlimeError

LASTING = range(20000, 32000)
"""below those that kernels give to outgoing connections: Linux begins at 32768, others at 49152"""


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address and no other; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def url_at(host: str, port: int) -> str:
    """Where a server that is bound to `host` is reached from this machine."""
    seen = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{seen}]:{port}" if ":" in seen else f"http://{seen}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, for a process that listens there seconds or minutes later: none of those that
    are given to connections in between."""
    for port in random.SystemRandom().sample(LASTING, 100):
        with contextlib.suppress(OSError):
            listen(host, port).close()
            return port
    try:
        with listen(host) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise cannot_listen(host, 0, error) from None


def check_free(host: str, port: int) -> None:
    """Raise the SlimeError that listening there would end with, before anything is made ready for it."""
    try:
        listen(host, port).close()
    except OSError as error:
        raise cannot_listen(host, port, error) from None


def cannot_listen(host: str, port: int, error: OSError) -> SlimeError:
    """What to tell who asked for an address."""
    if error.errno == errno.EADDRINUSE:
        return SlimeError(f"port {port} on {host} is in use", "stop who uses it, or take --port 0")
    return SlimeError(f"cannot listen on {host}:{port}: {error.strerror}", "check the address")
