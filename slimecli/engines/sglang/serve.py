"""The program of a server process: SGLang's own server, ended when the process that started it is gone.

Run as a script by the Python that has SGLang: nothing of slime can be imported here. Standard input is a pipe. Its
first line is the API key (empty: none); then the starter holds it open, and the kernel closes it however the starter
ends, so that no server outlives a killed run.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

GRACE_S = 5.0
"""between asking the server's processes to end and ending them (seconds)"""


def read_line(stream: int) -> str:
    """One line, byte by byte: what follows it is left in the pipe."""
    line = b""
    while (byte := os.read(stream, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def follow(stream: int) -> None:
    """Wait for the end of a pipe, then end this process's whole group."""
    while os.read(stream, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


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
