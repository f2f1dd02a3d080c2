"""A router's process: started, asked, restarted when it dies, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimecli import console, env
from slimecli.engines.router.__main__ import KEY_VARIABLE
from slimecli.errors import SlimeError
from slimecli.ports import free_port, url_at

CALL_S = 10.0
"""deadline of a call to a router (seconds)"""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""routers are on this machine or its network: no proxy stands between"""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a router is started."""

    name: str
    """as in engine.router"""
    line: tuple[str, ...]
    """command with the user's arguments"""
    host: str
    port: int
    """0: a free one"""
    log: Path
    api_key: str = field(default="", repr=False)
    timeout_s: float = 300.0
    """deadline for it to answer (seconds)"""
    max_restarts: int = 0
    """how often it is started again when it dies"""
    roles: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """engine -> (prefill or decode, port at which results of prompts are fetched); empty: all engines are alike"""


class Router:
    """A running router.

    Args:
        launch: how it is started, now and after it died.
        urls: the engines behind it.
        on_death: called, from a thread, with the reason when it died and is not started again.

    Attributes:
        url: where it listens; the same after a restart.
        roles: as in Launch; an engine that is added later is entered here first.
    """

    def __init__(
        self, launch: Launch, urls: Sequence[str], on_death: Callable[[SlimeError], None] | None = None
    ) -> None:
        self._launch = launch
        self._urls = [u.rstrip("/") for u in urls]
        self._on_death = on_death
        self.roles = dict(launch.roles)
        self._port = launch.port or free_port(launch.host)
        self.url = url_at(launch.host, self._port)
        self.restarts = 0
        self._closing = False
        self._lock = threading.Lock()
        self._start()
        threading.Thread(target=self._watch, name="slime-router-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def workers(self) -> list[dict[str, Any]]:
        """The engines as it sees them: `url`, `is_healthy`, `load`, ..."""
        found: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return found

    def add(self, url: str) -> None:
        """Take an engine in, and wait until the router gives it requests."""
        url = url.rstrip("/")
        with self._lock:
            if url not in self._urls:
                self._urls.append(url)
        if all(w["url"] != url for w in self.workers()):
            kind, port = self.roles.get(url, ("", 0))
            role = {"worker_type": kind} | ({"bootstrap_port": port} if port else {}) if kind else {}
            self._call("POST", "/workers", {"url": url, **role})
        self._wait(lambda: any(w["url"] == url and w["is_healthy"] for w in self.workers()), f"take in {url}")

    def remove(self, url: str) -> None:
        """Leave an engine out. One that is not there is no error."""
        url = url.rstrip("/")
        with self._lock:
            self._urls = [u for u in self._urls if u != url]
        for worker in self.workers():
            if worker["url"] == url:
                self._call("DELETE", f"/workers/{worker['id']}")

    def close(self, drain_s: float = 1.0) -> None:
        """Stop it; requests in flight get `drain_s` to end (seconds). Idempotent."""
        with self._lock:
            self._closing = True
        _stop(self._process, drain_s)

    def _start(self) -> None:
        """Start the process and wait until it is ready."""
        launch = self._launch
        line = [*launch.line, "--host", launch.host, "--port", str(self._port)]
        line += self._engine_words()
        line += ["--parent", str(os.getpid())] if launch.name == "builtin" else _quiet(launch)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        variables = env.child_env(**({KEY_VARIABLE: launch.api_key} if launch.api_key else {}))
        with self._lock, launch.log.open("ab") as log:
            if self._closing:  # while a router that died was about to be started again
                raise SlimeError(f"the router at {self.url} is closed", "start another one")
            # a session of its own: a Ctrl-C is ours to answer, and the router goes last
            self._process = process = subprocess.Popen(
                line, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        try:
            self._wait(self._is_ready, "answer")
        except SlimeError:
            _stop(process, 0.0)
            raise

    def _engine_words(self) -> list[str]:
        """How the router is told of its engines when it starts."""
        if not self.roles:
            return ["--worker-urls", *self._urls] if self._urls else []
        words = ["--pd-disaggregation"]
        for url in self._urls:
            kind, port = self.roles[url]
            words += ["--prefill", url, str(port)] if kind == "prefill" else ["--decode", url]
        return words

    def _is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            self._call("GET", "/readiness" if self._urls else "/liveness")
            return True
        return False

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._launch.timeout_s
        while time.monotonic() < end:
            if not self.alive():
                code = self._process.returncode
                raise SlimeError(
                    f"the router ({self._launch.name}) ended with exit code {code} before it could {what}: "
                    f"{_tail(self._launch.log)}",
                    f"see {self._launch.log}",
                )
            with contextlib.suppress(OSError):
                if is_done():
                    return
            time.sleep(0.05)
        raise SlimeError(
            f"the router ({self._launch.name}) at {self.url} did not {what} within {self._launch.timeout_s:g} s: "
            f"{_tail(self._launch.log)}",
            f"see {self._launch.log}; --set engine.router=none",
        )

    def _call(self, method: str, path: str, payload: Any = None) -> Any:
        data = None if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        if self._launch.api_key:
            headers["Authorization"] = f"Bearer {self._launch.api_key}"
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with _direct.open(request, timeout=CALL_S) as answer:
            raw = answer.read()
        return json.loads(raw) if raw.startswith((b"{", b"[")) else raw

    def _watch(self) -> None:
        """Start it again at the same address when it dies, as often as allowed."""
        while True:
            code = self._process.wait()
            with self._lock:
                if self._closing:
                    return
            begin, what = time.monotonic(), f"the router at {self.url} died (exit code {code})"
            if self.restarts >= self._launch.max_restarts:
                self._give_up(SlimeError(what, f"see {self._launch.log}"))
                return
            self.restarts += 1
            try:
                self._start()
            except SlimeError as error:
                with self._lock:
                    if self._closing:
                        return
                self._give_up(SlimeError(f"{what}; {error.what}", error.fix))
                return
            console.warn(f"{what}: restarted in {time.monotonic() - begin:.1f} s")

    def _give_up(self, error: SlimeError) -> None:
        console.warn(f"{error.what}; it is not restarted")
        if self._on_death is not None:
            self._on_death(error)


def _quiet(launch: Launch) -> list[str]:
    """Defaults of ours for smg and sglang-router, where the user did not choose: two of them would want one port for
    their metrics, and every request would leave two lines in the log."""
    given = set(launch.line)
    line = [] if "--prometheus-port" in given else ["--prometheus-port", str(free_port())]
    line += [] if "--prometheus-host" in given else ["--prometheus-host", "127.0.0.1"]
    return line + ([] if "--log-level" in given else ["--log-level", "warn"])


def _stop(process: subprocess.Popen[bytes], drain_s: float) -> None:
    process.terminate()
    try:
        process.wait(drain_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-500:] or "it said nothing"
