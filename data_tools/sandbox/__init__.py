"""Running Python code that a model wrote: in processes of its own, with limits, and cut off where the kernel allows.

`run_python` never runs the code in this process. What holds it: its own session, working folder and almost empty
environment; limits on time, memory, processes, files and output; under root another user; where user namespaces are
permitted also no network, no sight of other processes, and a read-only file system around a small folder that vanishes.
`isolation` says what this machine gives. Files that the user (under root: nobody) may read can be read by the code, so
keep secrets out of the account that trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import SlimeError

CHILD = Path(__file__).resolve().parent / "child.py"
GRACE_S = 3.0
"""seconds after the deadline for the processes inside to end by themselves"""
PARTS = ("network", "processes", "files")
"""kinds of isolation, see `isolation`"""
LEAST = ("processes",)
"""without this the code could end or read this very process"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a piece of code may use."""

    wall_s: float = 10.0
    """seconds on the clock"""
    cpu_s: float = 10.0
    """seconds of processor time of one process, rounded up to whole ones"""
    memory_mb: int = 1024
    """address space of one process (MiB)"""
    processes: int = 8
    """processes and threads at a time"""
    file_mb: int = 64
    """size of a file, and of the working folder where it is its own file system (MiB)"""
    open_files: int = 64
    """open files of one process"""
    output_bytes: int = 1 << 20
    """bytes of stdout, and of stderr; more ends the code"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the code ended."""

    status: str
    """ok: exit code 0; error: another exit code; time, output: over that limit; killed: ended by a signal"""
    exit_code: int
    """negative: the signal that ended it"""
    stdout: str
    stderr: str
    seconds: float
    """on the clock, start of the processes included"""
    results: list[tuple[bool, Any]] | None = None
    """[checks] (passed, value or why not); None when they were not reached: the code left early or broke"""
    isolation: dict[str, bool] = field(default_factory=dict)
    """part -> whether it held"""


def run_python(
    code: str,
    *,
    stdin: str = "",
    checks: Sequence[dict[str, str]] | None = None,
    all_checks: bool = False,
    limits: Limits | None = None,
    required: Sequence[str] = LEAST,
) -> Outcome:
    """Run Python source and say how it ended.

    Args:
        code: the program; it runs as `__main__`, or with `checks` as a module that they then use.
        stdin: what it reads.
        checks: {"kind": "assert", "code": statements} passes when nothing is raised; {"kind": "call", "code":
            expression} gives its value, for the caller to compare where the code cannot reach.
        all_checks: go on after a check that failed.
        limits: default: Limits().
        required: parts of isolation without which the code is not run.
    """
    limits = limits or Limits()
    secret = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="slime-sandbox-")
    try:
        _require(required)
        checks = None if checks is None else list(checks)
        job = {**asdict(limits), "code": code, "stdin": stdin, "checks": checks, "all_checks": all_checks}
        return _run(job | {"folder": folder, "secret": secret}, limits, secret)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def isolation() -> dict[str, bool]:
    """What this machine gives: {"network", "processes", "files"} -> whether code is cut off from it."""
    return run_python("pass", required=()).isolation


def _require(parts: Sequence[str]) -> None:
    missing = [p for p in parts if not isolation()[p]]
    if missing:
        raise SlimeError(
            f"model-written code cannot be cut off from: {', '.join(missing)}",
            "allow user namespaces (sysctl user.max_user_namespaces, or the container's seccomp profile), "
            "run as root in a container of its own, or accept less with reward.code.isolation",
        )


def _run(job: dict[str, Any], limits: Limits, secret: str) -> Outcome:
    start = time.monotonic()
    control, control_w = os.pipe()
    report, report_w = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), str(control_w), str(report_w)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=job["folder"],
            env={"PATH": "/usr/bin:/bin", "HOME": job["folder"], "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            pass_fds=(control_w, report_w),
            start_new_session=True,
        )
    finally:
        os.close(control_w)
        os.close(report_w)
    with process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        streams = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
        streams |= {"control": control, "report": report}
        try:
            texts, over = _read(streams, limits, start + limits.wall_s + GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(control)
            os.close(report)
    return _outcome(texts, over, time.monotonic() - start, secret)


def _read(streams: dict[str, int], limits: Limits, until: float) -> tuple[dict[str, str], str]:
    """Texts of the streams, and `output` or `time` when they were given up before their end.

    The control stream ends with the keeper, and with it everything inside; a process that got away may hold the
    others open, so the end of this one counts.
    """
    parts = {name: bytearray() for name in streams}
    with selectors.DefaultSelector() as selector:
        for name, descriptor in streams.items():
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ, name)
        left, over, ended = len(streams), "", False
        while left and not over:
            wait = 0.05 if ended else until - time.monotonic()
            events = selector.select(max(wait, 0))
            if not events:
                over = "" if ended else "time"
                break
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                parts[key.data] += data
                if not data:
                    selector.unregister(key.fd)
                    left -= 1
                    ended = ended or key.data == "control"
                elif key.data in ("stdout", "stderr") and len(parts[key.data]) > limits.output_bytes:
                    over = "output"
    return {name: bytes(data[: limits.output_bytes]).decode(errors="replace") for name, data in parts.items()}, over


def _outcome(texts: dict[str, str], over: str, seconds: float, secret: str) -> Outcome:
    messages = [json.loads(line) for line in texts["control"].splitlines()]
    if not messages or not messages[0].get("started"):
        raise SlimeError(
            f"the sandbox did not start: {texts['stderr'].strip()[-300:] or 'no message'}",
            "check that this account may start processes and read the Python installation",
        )
    end = messages[1] if len(messages) > 1 else {"exit": -signal.SIGKILL, "late": False, "cpu_s": 0.0}
    code = int(end["exit"])
    status = over or ("time" if end["late"] or code == -signal.SIGXCPU else "")
    status = status or ("ok" if code == 0 else "killed" if code < 0 else "error")
    return Outcome(
        status=status,
        exit_code=code,
        stdout=texts["stdout"],
        stderr=texts["stderr"],
        seconds=seconds,
        results=_results(texts["report"], secret),
        isolation=messages[0]["isolation"],
    )


def _results(report: str, secret: str) -> list[tuple[bool, Any]] | None:
    try:
        data = json.loads(report)
        if data["secret"] == secret:
            return [(bool(passed), value) for passed, value in data["results"]]
    except (ValueError, KeyError, TypeError):
        pass  # the code wrote something else there, or nothing: no check counts
    return None
