"""Embedded engines in processes of their own that a test may kill or stop. Torch is imported once, by a fork server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import SERVER


def _serve(model: str, port: int, slots: int, pipe: Any) -> None:
    from slimecli import env

    env.set_threads(1)
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.embedded.server import Server

    async def run() -> None:
        server = Server(EmbeddedEngine(Path(model), slots=slots, max_context=256))
        pipe.send(await server.start("127.0.0.1", port))
        await asyncio.Event().wait()

    asyncio.run(run())


@dataclass
class EngineProcess:
    """A server on loopback."""

    url: str
    process: Any

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL: nothing is said, connections break."""
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    @property
    def lives(self) -> bool:
        return bool(self.process.is_alive())


class Stock:
    """Engines of one model, used by one test after another; those that a test killed are replaced."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._all: list[EngineProcess] = []

    def take(self, count: int) -> list[EngineProcess]:
        """That many living engines."""
        self._all = [e for e in self._all if e.lives]
        for engine in self._all:
            engine.thaw()
        while len(self._all) < count:
            self._all.append(start_engine(self.model))
        return self._all[:count]

    def adopt(self, engine: EngineProcess) -> None:
        """One that a test started: it ends with the others."""
        self._all.append(engine)

    def close(self) -> None:
        """Kill all of them."""
        for engine in self._all:
            engine.kill()


async def soon(what: Any, seconds: float = 15.0) -> None:
    """Wait until `await what()` is true."""
    end = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.02)


def is_busy(engine: EngineProcess) -> Any:
    """For `soon`: whether an engine is generating."""

    async def look() -> bool:
        with await asyncio.to_thread(urllib.request.urlopen, engine.url + "/v1/loads", timeout=5) as answer:
            return json.loads(answer.read())["num_running_reqs"] > 0

    return look


def is_idle(engine: EngineProcess) -> Any:
    """For `soon`: the opposite."""

    async def look() -> bool:
        return not await is_busy(engine)()

    return look


def start_engine(model: Path, *, port: int = 0, slots: int = 32) -> EngineProcess:
    """Start one and wait until it listens."""
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=_serve, args=(str(model), port, slots, theirs), daemon=True)
    process.start()
    theirs.close()  # so that an engine that fails at its start ends the wait
    assert ours.poll(60), "the engine did not start"
    return EngineProcess(ours.recv(), process)


def payload(number: int, tokens: int = 8) -> dict[str, Any]:
    """A request whose answer depends on its number alone."""
    params = {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": number, "ignore_eos": True}
    return {"input_ids": [5 + number % 200, 7, 9], "sampling_params": params, "return_logprob": True}


def said(reply: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What must not depend on who answered."""
    return reply["output_ids"], [t[0] for t in reply["meta_info"]["output_token_logprobs"]]
