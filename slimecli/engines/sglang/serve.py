"""The program of a server process: SGLang's own server, ended when the process that started it is gone.

Run as a script by the Python that has SGLang: nothing of slime can be imported here. Standard input is a pipe. Its
first line is the API key (empty: none); then the starter holds it open, and the kernel closes it however the starter
ends, so that no server outlives a killed run.
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

SHARED = Path("/dev/shm")
NAMES = ("sglang_loads_*", "sem.mp-*")
"""what SGLang leaves behind: its load statistics, and semaphores whose owner it kills"""


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # the command name, in parentheses, may hold spaces: state, parent and group follow it
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                found += [int(entry.name)] if state != "Z" and int(its_group) == group else []
    return found


def listens(group: int, port: int) -> bool:
    """Whether a process of the group listens on a port: another program there must not be taken for the server."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            # local address, state (0A: listening) and inode of the socket
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    for process in members(group) if sockets else []:
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in sockets for link in Path(f"/proc/{process}/fd").iterdir()):
                return True
    return False


def leftovers(group: int) -> set[Path]:
    """Files in /dev/shm of SGLang's kinds that processes of a group have mapped; told by inode, for names change."""
    inodes: set[int] = set()
    for process in members(group):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    found = set()
    for path in (path for name in NAMES for path in SHARED.glob(name)):
        with contextlib.suppress(OSError):
            found |= {path} if path.stat().st_ino in inodes else set()
    return found


def read_line(stream: int) -> str:
    """One line, byte by byte: what follows it is left in the pipe."""
    line = b""
    while (byte := os.read(stream, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def follow(stream: int) -> None:
    """Wait for the end of a pipe, then end this process's own group, which has nothing that it would have to save."""
    while os.read(stream, 4096):
        pass
    # a group that this process does not lead is somebody else's
    own = os.getpgrp() == os.getpid()
    for path in leftovers(os.getpgrp()) if own else ():
        path.unlink(missing_ok=True)
    (os.killpg if own else os.kill)(os.getpid(), signal.SIGKILL)


def main() -> None:
    """SGLang's `python -m sglang.launch_server`, with this process's arguments."""
    key = read_line(0)
    sys.argv += ["--api-key", key] if key else []
    threading.Thread(target=follow, args=(os.dup(0),), name="slime-follow", daemon=True).start()
    # SGLang's processes shall neither hold the pipe nor read from it
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # files beside this script must not stand for modules of the same name
    here = str(Path(__file__).parent)
    sys.path[:] = [place for place in sys.path if place != here]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
