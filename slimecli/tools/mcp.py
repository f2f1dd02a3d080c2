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
import shlex
import signal
import subprocess
import threading
from collections import deque
from concurrent.futures import Future
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
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._starts = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: deque[str] = deque(maxlen=20)
        """last lines of its stderr"""
        self._restarts = -1
        atexit.register(self.close)
        self._ensure()

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
        if self._process is None or self._process.poll() is not None:
            await asyncio.to_thread(self._ensure)
        number, future = self._send("tools/call", {"name": name, "arguments": arguments})
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            self._waiting.pop(number, None)
            self._write({"method": "notifications/cancelled", "params": {"requestId": number, "reason": "deadline"}})
            raise
        text = _text(result)
        if result.get("isError"):
            raise ToolError(text or "the tool failed")
        return text

    def _ensure(self) -> None:
        """Start the server unless it runs."""
        with self._starts:
            if self._process is not None and self._process.poll() is None:
                return
            if self._restarts >= MAX_RESTARTS:
                raise self._dead(f"died {self._restarts + 1} times")
            self._restarts += 1
            self._start()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
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
        for body in (self._read, self._listen):
            threading.Thread(target=body, args=(self._process,), daemon=True, name=f"slime-mcp-{self._name}").start()
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "slime", "version": slimecli.__version__},
        }
        self._ask("initialize", hello, START_S)
        self._write({"method": "notifications/initialized"})

    def _ask(self, method: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """A request and its result, waited for in this thread."""
        number, future = self._send(method, params)
        try:
            result: dict[str, Any] = future.result(timeout_s)
        except TimeoutError:
            self._waiting.pop(number, None)
            raise self._dead(f"did not answer {method} within {timeout_s:g} s") from None
        return result

    def _send(self, method: str, params: dict[str, Any]) -> tuple[int, Future[Any]]:
        number, future = next(self._ids), Future[Any]()
        self._waiting[number] = future
        if not self._write({"id": number, "method": method, "params": params}):
            self._waiting.pop(number, None)
            raise self._dead("has ended")
        return number, future

    def _write(self, message: dict[str, Any]) -> bool:
        """False where nobody reads any more."""
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        process = self._process
        if process is None or process.stdin is None:
            return False
        try:
            with self._lock:
                process.stdin.write(data)
                process.stdin.flush()
        except (OSError, ValueError):  # ValueError: closed by us
            return False
        return True

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Body of the reading thread: hands every answer to who waits for it, until the server ends."""
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self._hear(line)
        process.wait()
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None and not waiting.cancelled():
                waiting.set_exception(self._dead(f"ended with exit code {process.returncode}"))

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):  # a server that prints among its messages
            self._said.append(line.decode(errors="replace").rstrip())
        elif "method" in message:
            self._answer(message)
        elif future := self._waiting.pop(message.get("id", 0), None):
            _settle(future, message)

    def _answer(self, message: dict[str, Any]) -> None:
        """What the server asks of us: a ping is answered, everything else is not offered."""
        if "id" not in message:
            return
        if message["method"] == "ping":
            self._write({"id": message["id"], "result": {}})
        else:
            error = {"code": _METHOD_NOT_FOUND, "message": f"{message['method']} is not offered"}
            self._write({"id": message["id"], "error": error})

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
        process, self._process = self._process, None
        self._restarts = MAX_RESTARTS
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError), self._lock:
                process.stdin.close()
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if sign is not None:
                    os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what it left behind
            os.killpg(process.pid, signal.SIGKILL)


def _settle(future: Future[Any], message: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if "error" in message:
        error = message["error"]
        said = error.get("message", error) if isinstance(error, dict) else error
        future.set_exception(ToolError(str(said)))
    else:
        future.set_result(message.get("result") or {})


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
