"""What generates behind `slime serve`: the embedded engine in this process, or servers of their own behind a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from slimecli import console, env
from slimecli.agents.text_engine import HttpStream, TextEngine, embedded, remote
from slimecli.engines import api_key, fitting_context, open_embedded
from slimecli.engines.embedded.__main__ import KEY_VARIABLE
from slimecli.engines.http import HttpEngine
from slimecli.engines.router import router_program, start_router
from slimecli.engines.router.programs import words
from slimecli.errors import SlimeError, UsageError
from slimecli.protocols import RolloutEngine, WeightUpdate
from slimecli.recipe import Recipe
from slimecli.types import WeightReceipt

WATCH_S = 0.5
STOP_S = 10.0
"""a server that was told to stop has so long before it is killed (seconds)"""


class Worker(Protocol):
    """A server in a process of its own."""

    url: str

    def alive(self) -> bool:
        """Whether its process runs."""

    def close(self) -> None:
        """Stop it. Idempotent."""


class EmbeddedWorker:
    """`python -m slimecli.engines.embedded`, which ends when this process does."""

    def __init__(self, recipe: Recipe, model_dir: Path, log: Path, device: str = "auto", *, key: str = "") -> None:
        section = recipe.engine
        words = {
            "model": model_dir,
            "slots": section.slots,
            "max-context": fitting_context(recipe, model_dir),
            "dtype": section.dtype,
            "device": device,
            "threads": section.threads,
            "parent": os.getpid(),
        }
        line = [sys.executable, "-m", "slimecli.engines.embedded"]
        line += [word for name, value in words.items() for word in (f"--{name}", str(value))]
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = env.child_env(**({KEY_VARIABLE: key} if key else {}))  # on the command line `ps` would show it
        with log.open("ab") as handle:
            # a session of its own: a Ctrl-C is ours to answer
            self._process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=handle, env=variables, start_new_session=True
            )
        self.url = self._first_line(section.start_timeout_s, log)

    def _first_line(self, timeout_s: float, log: Path) -> str:
        said: queue.Queue[bytes] = queue.Queue()
        assert self._process.stdout is not None
        read = self._process.stdout.readline
        threading.Thread(target=lambda: said.put(read()), daemon=True).start()
        with contextlib.suppress(queue.Empty, json.JSONDecodeError):
            return str(json.loads(said.get(timeout=timeout_s))["url"])
        self.close()
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
        raise SlimeError(f"an engine did not start within {timeout_s:g} s: {tail or 'it said nothing'}", f"see {log}")

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop it. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Fleet(Protocol):
    """Engines behind one TextEngine."""

    text: TextEngine
    key: str
    """what servers of their own ask for"""

    @property
    def urls(self) -> list[str]:
        """Addresses of servers of their own; empty: the engine is in this process."""

    async def update(self, update: WeightUpdate) -> list[WeightReceipt]:
        """Give every engine new weights; raises SlimeError naming the one that did not take them."""

    async def abort(self) -> None:
        """End every answer in flight with what it has."""

    async def watch(self) -> None:
        """Until cancelled: replace engines that die. Raises SlimeError when none is left."""

    async def close(self) -> None:
        """Stop everything. Idempotent."""


class LocalFleet:
    """The embedded engine in this process."""

    key = ""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        self.engine = open_embedded(recipe, model_dir)
        self.text = embedded(self.engine)

    @property
    def urls(self) -> list[str]:
        """None."""
        return []

    async def update(self, update: WeightUpdate) -> list[WeightReceipt]:
        """New weights for the one engine."""
        return [await self.engine.update_weights(update)]

    async def abort(self) -> None:
        """End every answer."""
        await self.engine.abort()

    async def watch(self) -> None:
        """It lives as long as this process."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Free everything."""
        await self.engine.close()


class ProcessFleet:
    """Servers in processes of their own, behind a router where there are several.

    Args:
        logs: folder for what they say.
        key: what clients of the front show. The servers ask for it too; smg and sglang-router would not pass it on.
    """

    def __init__(self, recipe: Recipe, model_dir: Path, logs: Path, key: str = "") -> None:
        self._recipe = recipe
        self.key = api_key(recipe) if recipe.engine.backend == "sglang" else key
        self._model_dir = model_dir
        self._logs = logs
        self._workers: dict[int, Worker] = {}
        """number -> server: its log, its seed and its GPUs go with the number"""
        self._clients: dict[str, HttpEngine] = {}
        self._restarts = 0
        self._current: WeightUpdate | None = None
        self._busy = asyncio.Lock()
        """held while weights change or an engine is replaced, so that a new one misses no update"""
        self._router: Any = None
        try:
            self._start()
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        program = router_program(self._recipe, api_key=self.key)
        routed = self._recipe.engine.replicas > 1 or self._recipe.engine.router not in ("auto", "none")
        if routed:  # told before engines load a model
            _check_router(self._recipe, program)
            if self.key and program != "builtin":
                if self._recipe.engine.backend == "sglang":
                    raise UsageError(f"{program} does not pass an API key on to SGLang's servers", "--router builtin")
                self.key = ""
        for number in range(self._recipe.engine.replicas):
            worker = self._worker(number)
            self._enter(number, worker, HttpEngine(worker.url, **self._limits))
        if routed:
            console.note(f"router: {program}")
            log = self._logs / "router.log"
            self._router = start_router(self._recipe, self.urls, host="127.0.0.1", port=0, log=log, api_key=self.key)
        self._front = HttpEngine(self._router.url if self._router else self.urls[0], **self._limits)
        context = fitting_context(self._recipe, self._model_dir)
        self.text = remote(self._front, self._model_dir, max_context=context, stream=HttpStream(self._front))

    @property
    def _limits(self) -> dict[str, Any]:
        rollout = self._recipe.rollout
        return {"timeout_s": rollout.request_timeout_s, "retries": rollout.max_retries, "api_key": self.key}

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [worker.url for worker in self._workers.values()]

    def _worker(self, number: int) -> Worker:
        log = self._logs / f"engine_{number}.log"
        if self._recipe.engine.backend == "sglang":
            from slimecli.engines.sglang.launch import start_server

            each = self._recipe.gpus_per_engine
            devices = range(number * each, (number + 1) * each) if gpus() >= each * self._recipe.engine.replicas else ()
            return start_server(
                self._recipe, self._model_dir, host="127.0.0.1", log=log, devices=list(devices), index=number
            )
        device = f"cuda:{number % gpus()}" if gpus() else "auto"
        return EmbeddedWorker(self._recipe, self._model_dir, log, device, key=self.key)

    def _enter(self, number: int, worker: Worker, client: HttpEngine) -> None:
        self._workers[number] = worker
        self._clients[worker.url] = client

    async def update(self, update: WeightUpdate) -> list[WeightReceipt]:
        """New weights for all, one after the other: the others go on answering meanwhile."""
        async with self._busy:
            receipts = []
            for url in self.urls:
                try:
                    receipts.append(await self._clients[url].update_weights(update))
                except SlimeError as error:
                    raise SlimeError(f"the engine at {url}: {error.what}", error.fix) from error
            self._current = update
            return receipts

    async def abort(self) -> None:
        """End every answer."""
        await self._each(lambda e: e.abort())

    async def _each(self, act: Callable[[RolloutEngine], Any]) -> None:
        answers = await asyncio.gather(*(act(c) for c in self._clients.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, SlimeError):
                console.note(answer.what)
            elif isinstance(answer, BaseException):
                raise answer

    async def watch(self) -> None:
        """Replace what dies, engine.max_restarts times; meanwhile the others answer."""
        while True:
            for number in range(self._recipe.engine.replicas):
                worker = self._workers.get(number)
                if worker is not None and not worker.alive():
                    async with self._busy:
                        await self._remove(number, worker)
                if number not in self._workers and self._may_restart:
                    async with self._busy:
                        await self._replace(number)
                if not self._workers and not self._may_restart:
                    raise SlimeError("no engine is left", f"see {self._logs}")
            await asyncio.sleep(WATCH_S)

    @property
    def _may_restart(self) -> bool:
        section = self._recipe.engine
        return section.on_failure == "restart" and self._restarts < section.max_restarts * section.replicas

    async def _remove(self, number: int, dead: Worker) -> None:
        console.warn(f"the engine at {dead.url} has died (see {self._logs / f'engine_{number}.log'})")
        del self._workers[number]
        await self._clients.pop(dead.url).close()
        if self._router:
            await asyncio.to_thread(self._router.remove, dead.url)

    async def _replace(self, number: int) -> None:
        """A new engine with the weights of the others; one that cannot be started counts as a try."""
        self._restarts += 1
        try:
            worker = await asyncio.to_thread(self._worker, number)
        except SlimeError as error:
            console.warn(f"engine {number} cannot be replaced: {error.what}")
            return
        client = HttpEngine(worker.url, **self._limits)
        try:
            if self._current is not None:
                await client.update_weights(self._current)
            if self._router:
                await asyncio.to_thread(self._router.add, worker.url)
        except BaseException as error:
            await client.close()
            await asyncio.to_thread(worker.close)
            if not isinstance(error, SlimeError):
                raise
            console.warn(f"the engine at {worker.url}, in the place of engine {number}, is of no use: {error.what}")
            return
        self._enter(number, worker, client)
        if not self._router:
            self._front.url = worker.url
        console.say(f"a new engine at {worker.url} took its place")

    async def close(self) -> None:
        """Stop router and servers."""
        for client in [self._front, *self._clients.values()]:
            await client.close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self._workers.values():
                stack.callback(worker.close)
            if self._router:
                stack.callback(self._router.close)


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def _check_router(recipe: Recipe, program: str) -> None:
    """Raise what starting the router would end with."""
    if program == "none":
        raise UsageError(
            f"{recipe.engine.replicas} replicas behind one address need a router, but engine.router = 'none'",
            "--router auto, or --replicas 1",
        )
    words(program, recipe.router)


def open_fleet(recipe: Recipe, model_dir: Path, logs: Path, key: str = "") -> Fleet:
    """In this process where one embedded engine is enough, else in processes of their own, which ask for the key."""
    section = recipe.engine
    if section.backend == "embedded" and section.replicas == 1 and section.router in ("auto", "none"):
        return LocalFleet(recipe, model_dir)
    return ProcessFleet(recipe, model_dir, logs, key)


def versions_of(receipts: Sequence[WeightReceipt]) -> str:
    """Versions and fingerprints, for messages."""
    return ", ".join(sorted({f"{r.version}/{r.fingerprint or 'no fingerprint'}" for r in receipts}))
