"""Tools of MCP servers that run as child processes and speak JSON-RPC 2.0 over stdin and stdout, a message a line.

Protocol: https://modelcontextprotocol.io/specification/2025-06-18 (initialize, tools/list, tools/call, ping).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import slimecli
from slimecli.errors import SlimeError
from slimecli.tools.base import Tool, ToolError

PROTOCOL = "2025-06-18"
START_S = 30.0
"""deadline of a server's start (seconds)"""
END_S = 2.0
"""how long a server has to end by itself when its input ends, and again when it is told to (seconds)"""
MAX_RESTARTS = 3
"""how often a server that died is started again"""
_METHOD_NOT_FOUND = -32601


@dataclass(frozen=True, kw_only=True, eq=False)
class _Life:
    """One process of the server, from its start to its end."""

    process: subprocess.Popen[bytes]
    waiting: dict[int, Future[Any]] = field(default_factory=dict)
    """number of a request -> who waits for its answer"""
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    """what a thread of its own writes, so that a server which does not read holds up nobody; None: no more"""

    def goes_on(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def write(self, message: dict[str, Any]) -> None:
        """Have a message written."""
        self.outbox.put(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def pour(self) -> None:
        """Body of the writing thread."""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as stream:
                while (data := self.outbox.get()) is not None:
                    stream.write(data)
                    stream.flush()
        except OSError:  # it has ended, or reads no more, which comes to the same
            self._signal(signal.SIGKILL)

    def end(self) -> None:
        """End the process and everything that it started."""
        self.outbox.put(None)
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            if sign is not None:
                self._signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
                break
        self._signal(signal.SIGKILL)  # what it left behind

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, sign)


class McpServer:
    """One server. Safe to use from several threads and event loops.

    Args:
        name: what the recipe calls it.
        command: its command line.
        timeout_s: deadline of one call (seconds).
    """

    def __init__(self, name: str, command: str, *, timeout_s: float) -> None:
        self._name = name
        self._command = command
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._starts = threading.Lock()
        self._life: _Life | None = None
        self._said: deque[str] = deque(maxlen=20)
        """last lines of its stderr"""
        self._restarts = -1
        atexit.register(self.close)
        try:
            self._ensure()
        except BaseException:
            self.close()
            raise

    def tools(self) -> list[Tool]:
        """All tools that it offers."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            answer = self._ask("tools/list", cursor, START_S)
            found += answer.get("tools", [])
            if not answer.get("nextCursor"):
                break
            cursor = {"cursor": answer["nextCursor"]}
        return [self._tool(entry) for entry in found]

    def _tool(self, entry: dict[str, Any]) -> Tool:
        name = str(entry["name"])

        async def call(arguments: dict[str, Any]) -> str:
            return await self._call(name, arguments)

        schema = dict(entry.get("inputSchema") or {"type": "object", "properties": {}})
        return Tool(
            name=name,
            description=str(entry.get("description") or entry.get("title") or name),
            parameters={"additionalProperties": True} | schema,  # the server itself judges what it left open
            call=call,
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._life is None or not self._life.goes_on():
            await asyncio.to_thread(self._ensure)
        life, number, future = self._send("tools/call", {"name": name, "arguments": arguments})
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            life.waiting.pop(number, None)
            life.write({"method": "notifications/cancelled", "params": {"requestId": number, "reason": "deadline"}})
            raise
        text = _text(result)
        if result.get("isError"):
            raise ToolError(text or "the tool failed")
        return text

    def _ensure(self) -> None:
        """Start the server unless it runs."""
        with self._starts:
            if self._life is not None and self._life.goes_on():
                return
            if self._restarts >= MAX_RESTARTS:
                raise self._dead(f"died {self._restarts + 1} times")
            self._restarts += 1
            self._start()

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                shlex.split(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise SlimeError(
                f"the MCP server {self._name!r} cannot be started: {error}", f"see tools.mcp.{self._name}"
            ) from error
        self._life = life = _Life(process=process)
        for body in (life.pour, lambda: self._read(life), lambda: self._listen(process)):
            threading.Thread(target=body, daemon=True, name=f"slime-mcp-{self._name}").start()
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "slime", "version": slimecli.__version__},
        }
        try:
            self._ask("initialize", hello, START_S)
        except SlimeError:  # one that runs without having been greeted would be taken for one that works
            life.end()
            raise
        life.write({"method": "notifications/initialized"})

    def _ask(self, method: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """A request and its result, waited for in this thread."""
        life, number, future = self._send(method, params)
        try:
            result: dict[str, Any] = future.result(timeout_s)
        except TimeoutError:
            life.waiting.pop(number, None)
            raise self._dead(f"did not answer {method} within {timeout_s:g} s") from None
        return result

    def _send(self, method: str, params: dict[str, Any]) -> tuple[_Life, int, Future[Any]]:
        """(whom, number, answer to come) of a request."""
        number, future, life = next(self._ids), Future[Any](), self._life
        if life is None:
            raise self._dead("has ended")
        life.waiting[number] = future
        life.write({"id": number, "method": method, "params": params})
        # what has ended before this tells no one any more; what ends later does
        if not life.goes_on() and life.waiting.pop(number, None) is not None:
            raise self._dead("has ended")
        return life, number, future

    def _read(self, life: _Life) -> None:
        """Body of the reading thread: hands every answer to who waits for it, until the server ends."""
        assert life.process.stdout is not None
        with life.process.stdout as stream:
            for line in stream:
                self._hear(life, line)
        life.process.wait()
        life.outbox.put(None)
        for number in list(life.waiting):
            waiting = life.waiting.pop(number, None)
            if waiting is not None and waiting.set_running_or_notify_cancel():
                waiting.set_exception(self._dead(f"ended with exit code {life.process.returncode}"))

    def _hear(self, life: _Life, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):  # a server that prints among its messages
            self._said.append(line.decode(errors="replace").rstrip())
            return
        number = message.get("id")
        if "method" in message:
            _answer(life, message)
        elif isinstance(number, int) and (future := life.waiting.pop(number, None)):
            _settle(future, message)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Body of the thread that reads stderr, so that the server never blocks on it."""
        assert process.stderr is not None
        with process.stderr as stream:
            for line in stream:
                self._said.append(line.decode(errors="replace").rstrip())

    def _dead(self, what: str) -> SlimeError:
        tail = " | ".join(list(self._said)[-3:])
        return SlimeError(
            f"the MCP server {self._name!r} {what}{': ' + tail if tail else ''}",
            f"run it by hand: {self._command}",
        )

    def close(self) -> None:
        """End the server and everything that it started. Idempotent."""
        atexit.unregister(self.close)
        life, self._life = self._life, None
        self._restarts = MAX_RESTARTS
        if life is not None:
            life.end()


def _answer(life: _Life, message: dict[str, Any]) -> None:
    """What the server asks of us: a ping is answered, everything else is not offered."""
    if "id" not in message:
        return
    if message["method"] == "ping":
        life.write({"id": message["id"], "result": {}})
    else:
        error = {"code": _METHOD_NOT_FOUND, "message": f"{message['method']} is not offered"}
        life.write({"id": message["id"], "error": error})


def _settle(future: Future[Any], message: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if "error" in message:
        error = message["error"]
        said = error.get("message", error) if isinstance(error, dict) else error
        future.set_exception(ToolError(str(said)))
    elif isinstance(result := message.get("result") or {}, dict):
        future.set_result(result)
    else:
        future.set_exception(ToolError(f"the server's answer is no object: {json.dumps(result)[:200]}"))


def _text(result: dict[str, Any]) -> str:
    """The parts of a result as text; what is no text is named."""
    parts = []
    for part in result.get("content") or []:
        if part.get("type") == "text":
            parts.append(str(part.get("text", "")))
        elif part.get("type") == "resource" and "text" in part.get("resource", {}):
            parts.append(str(part["resource"]["text"]))
        else:
            parts.append(f"[{part.get('type', 'unknown')} omitted]")
    if not parts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)
