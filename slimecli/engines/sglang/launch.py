"""Starts SGLang servers, waits until they answer, and ends them: each one a process group of its own, with a log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from slimecli import env
from slimecli.engines import api_key
from slimecli.engines.sglang.arguments import Place, command_words
from slimecli.engines.sglang.fields import installation
from slimecli.engines.sglang.serve import leftovers, listens, members
from slimecli.errors import SlimeError
from slimecli.ports import free_port, url_at
from slimecli.recipe import Recipe

HERE = Path(__file__).parent
Share = tuple[int, int, str]
"""(machines, number of this one, HOST:PORT at which they meet)"""
TRIES = 3
"""ports tried; another program may take one between its choice and its use"""
GRACE_S = 5.0
"""how long a server may take to end its processes, before they are ended from here (seconds)"""
_IN_USE = re.compile(r"address already in use|port is already in use|port \d+ is in use", re.IGNORECASE)
_REASON = re.compile(r"^(?:\[[^\]]*\] )?(?:[\w.]*(?:Error|Exception)\b|error:|RuntimeError)", re.IGNORECASE)
_FIXES: tuple[tuple[str, str], ...] = (
    (r"out of memory|not enough memory", "lower engine.slots or [sglang] mem_fraction_static"),
    (r"unrecognized arguments|invalid choice", "mend [sglang]; `python -m sglang.launch_server --help` lists them"),
    (r"Model architectures .* not supported", "this SGLang does not know the model: --set engine.backend=embedded"),
)
"""(pattern of a failure, what to do about it)"""


class Server:
    """A running SGLang server. Construct with start_server."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.url = url
        self.log = log
        self._process = process
        self._log_start = log_start
        self._leftovers: set[Path] = set()
        self._closing = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int:
        """The server's first process, and number of its process group."""
        return self._process.pid

    def alive(self) -> bool:
        """False once the first process has ended; it ends when any of the others does."""
        return self._process.poll() is None

    def trouble(self) -> str:
        """How the server ended, in one sentence, and the end of its log."""
        status = self._process.poll()
        lines = self.log_lines()
        reason = next((line for line in lines if _REASON.match(line)), lines[-1] if lines else "no output")
        how = "runs" if status is None else f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
        tail = "".join(f"\n    {line[:200]}" for line in lines[-8:])
        return f"the SGLang server at {self.url} {how}: {reason[:300]}{tail}"

    def log_lines(self) -> list[str]:
        """What the server wrote so far, without empty lines."""
        with self.log.open("rb") as handle:
            handle.seek(self._log_start)
            text = handle.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def note_leftovers(self) -> None:
        """Remember what this server has in /dev/shm, to remove it if the server cannot."""
        self._leftovers |= leftovers(self.pid)

    def close(self) -> None:
        """End the server's processes, and nothing else. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self.note_leftovers()
            assert self._process.stdin is not None
            self._process.stdin.close()
            end = time.monotonic() + GRACE_S
            while self.alive() and time.monotonic() < end:  # it ends the others with itself
                time.sleep(0.02)
            if self.alive() or members(self.pid):
                with contextlib.suppress(ProcessLookupError):  # the group is this server's own: start_new_session
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(10)
            for path in self._leftovers:
                path.unlink(missing_ok=True)
            self._closed = True


def start_server(
    recipe: Recipe,
    model_dir: Path,
    *,
    host: str = "",
    port: int = 0,
    log: Path,
    devices: Sequence[int] = (),
    index: int = 0,
    share: Share | None = None,
) -> Server:
    """Start a server and wait until it answers its health check.

    Args:
        host: address it binds to; empty: engine.host.
        port: 0 takes a free one.
        log: gets all that the server writes.
        devices: GPUs it may use; empty: all that this process sees.
        index: number of the server among the run's; it moves the seed.
        share: this machine's part in a server that is spread over several.

    Raises SlimeError with the reason and the end of the log if it ends or does not answer in engine.start_timeout_s.
    """
    host = host or recipe.engine.host
    for attempt in range(TRIES):
        own = Place(host=host, port=port or free_port(host), nccl_port=free_port(host), index=index)
        place = own if share is None else replace(own, machines=share[0], rank=share[1], meeting=share[2])
        server = _spawn(recipe, model_dir, place, log, devices)
        try:
            _wait(server, recipe.engine.start_timeout_s, api_key(recipe))
        except BaseException as error:
            taken = isinstance(error, SlimeError) and any(_IN_USE.search(line) for line in server.log_lines())
            server.close()
            if not taken or port or attempt == TRIES - 1:
                raise
            continue
        return server
    raise AssertionError("the last attempt raises")


def has_gpu() -> bool:
    """Whether servers find an NVIDIA GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def _spawn(recipe: Recipe, model_dir: Path, place: Place, log: Path, devices: Sequence[int]) -> Server:
    on_gpu = bool(devices) or has_gpu()
    found = installation(recipe.engine.python)
    words = command_words(recipe, model_dir.absolute(), place, on_gpu=on_gpu)
    key = api_key(recipe)
    extra = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    if not on_gpu:
        extra |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(found.folder, model_dir)),
        }
    variables = env.engine_env(recipe.engine.threads, **extra)
    if not on_gpu and recipe.gpus_per_engine > 1:
        variables.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _processors(recipe.gpus_per_engine))
    script = HERE / ("serve.py" if on_gpu else "cpu.py")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as handle:
        start = handle.tell()
        process = subprocess.Popen(
            [found.python, str(script), *words],
            stdin=subprocess.PIPE,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )
    assert process.stdin is not None
    # command lines can be read by every user of the machine, a pipe cannot; who waits tells of a server that is gone
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), key.encode() + b"\n")
    return Server(url_at(place.host, place.port), process, log, start)


def _processors(ranks: int) -> str:
    """All of this machine's for every rank: SGLang demands to be told once there are more ranks than NUMA nodes."""
    return "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * ranks)


def _other_models(sglang: Path, model_dir: Path) -> Iterator[str]:
    """Modules of SGLang's models that do not define this one: on a CPU most cannot be imported, and none is needed."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    wanted = [f"class {name}(" for name in config.get("architectures") or []]
    for path in sorted((sglang / "srt" / "models").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.stem not in ("__init__", "registry") and not any(name in text for name in wanted):
            yield path.stem


def _wait(server: Server, timeout_s: float, key: str) -> None:
    end = time.monotonic() + timeout_s
    port = urlsplit(server.url).port or 0
    while not (listens(server.pid, port) and _answers(server.url, key)):
        server.note_leftovers()
        if not server.alive():
            told = server.trouble()
            fix = next((fix for pattern, fix in _FIXES if re.search(pattern, told, re.IGNORECASE)), "")
            raise SlimeError(f"SGLang did not start: {told}", fix or f"see {server.log}")
        if time.monotonic() > end:
            raise SlimeError(
                f"SGLang did not answer its health check within {timeout_s:g} s (engine.start_timeout_s): "
                f"{server.trouble()}",
                f"see {server.log}; raise engine.start_timeout_s if it is only slow",
            )
        time.sleep(0.3)
    server.note_leftovers()


def _answers(url: str, key: str) -> bool:
    # no proxy: the environment's is for the internet
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {key}"})
    try:
        with opener.open(request, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
