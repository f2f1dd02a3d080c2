"""sympy and math-verify in a process of their own: both may think without end, and a process can be stopped.

One process serves all scores in turn. It is started on first use, ends with this one, and is replaced when it is late.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slimecli import env
from slimecli.errors import SlimeError, UsageError

SECONDS = 5.0
"""deadline of one question"""
START_SECONDS = 60.0
"""deadline of the first one, which waits for the import"""
PROGRAM = Path(__file__).resolve().parent / "_solver_program.py"


class SolverTimeout(SlimeError):
    """sympy did not decide in time."""


class _Solver:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._warm: set[str] = set()

    def ask(self, question: dict[str, Any]) -> Any:
        """The answer to one question."""
        with self._lock:
            process = self._running()
            limit = SECONDS if question["op"] in self._warm else START_SECONDS
            try:
                reply = _exchange(process, question, limit)
            except (TimeoutError, BrokenPipeError, EOFError, ValueError) as error:
                self._stop()
                raise SolverTimeout(
                    f"sympy found no end in {limit:g} s, or broke, on {json.dumps(question)[:200]}",
                    "nothing to do if it is rare: the sample is counted as failed",
                ) from error
            self._warm.add(question["op"])
        if "missing" in reply:
            raise UsageError(f"the package {reply['missing']} is not installed", "pip install 'slimecli[math]'")
        return reply["answer"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._warm.clear()
            # -P: files beside the program have the names of libraries
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=env.child_env(OMP_NUM_THREADS="1"),
                start_new_session=True,
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert stream is not None
                    stream.close()
            process.wait()


def _exchange(process: subprocess.Popen[bytes], question: dict[str, Any], limit: float) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    process.stdin.flush()
    until, data = time.monotonic() + limit, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not data.endswith(b"\n"):
            if not selector.select(max(until - time.monotonic(), 0)):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            data += part
    reply: dict[str, Any] = json.loads(data)
    return reply


_solver = _Solver()


def _forget() -> None:
    """A forked child has its parent's pipes; it must not talk into them."""
    global _solver
    _solver = _Solver()


os.register_at_fork(after_in_child=_forget)


def equal(first: str, second: str) -> bool:
    """Whether sympy finds no difference between two pieces of plain arithmetic, written as Python."""
    return bool(_solver.ask({"op": "equal", "first": first, "second": second}))


def math_verify(response: str, label: str) -> bool:
    """Whether the package math-verify takes the response for the label."""
    return bool(_solver.ask({"op": "math_verify", "response": response, "label": label}))
