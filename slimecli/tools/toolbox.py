"""All tools of a recipe: built-in ones, own functions, and those of MCP servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimecli.data_tools.hooks import load_object
from slimecli.data_tools.rewards.threads import Gate
from slimecli.errors import SlimeError, UsageError, nearest
from slimecli.lookup import look_up
from slimecli.recipe_tools import ToolsSection
from slimecli.tools.base import Tool, ToolError, as_tool
from slimecli.tools.builtin import BUILTIN
from slimecli.tools.mcp import McpServer
from slimecli.tools.parsers import ToolCall


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What came of one call."""

    text: str
    """output, or what went wrong, as the model is told"""
    failed: bool
    seconds: float


class Toolbox:
    """Calls tools, with a deadline for each call and a bound on how many run at the same time.

    MCP servers start with it, and end with `close`.
    """

    def __init__(self, section: ToolsSection) -> None:
        self._timeout_s = section.timeout_s
        self._gate = Gate(section.concurrency)
        self._servers: list[McpServer] = []
        self.tools: dict[str, Tool] = {}
        """name -> tool, in the recipe's order"""
        try:
            for name in section.use:
                self._add(open_tool(name, section), name)
            for name, command in section.mcp.items():
                self._servers.append(McpServer(name, command, timeout_s=section.timeout_s))
                for tool in self._servers[-1].tools():
                    self._add(tool, f"the MCP server {name}")
        except BaseException:
            self.close()
            raise

    def _add(self, tool: Tool, source: str) -> None:
        if tool.name in self.tools:
            raise UsageError(f"two tools are named {tool.name!r}, one of them from {source}", "rename one")
        self.tools[tool.name] = tool

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """What chat templates are given; of some tools, or of all."""
        chosen = list(self.tools) if names is None else names
        for name in chosen:
            if name not in self.tools:
                raise SlimeError(
                    f"the row offers a tool {name!r}, which the recipe does not have{nearest(name, list(self.tools))}",
                    "add it to tools.use, or take it out of the row's tools",
                )
        return [self.tools[name].schema() for name in chosen]

    async def call(self, call: ToolCall, offered: Sequence[str] | None = None) -> ToolResult:
        """Run one call. What goes wrong inside the tool is told to the model; only a broken server is raised.

        Args:
            offered: names that the model was shown; None: all.
        """
        begin = time.monotonic()
        try:
            text, failed = await self._run(call, offered), False
        except ToolError as error:
            text, failed = f"Error: {error.what}", True
        except TimeoutError:
            text, failed = f"Error: no result within {self._timeout_s:g} s", True
        return ToolResult(text=text, failed=failed, seconds=time.monotonic() - begin)

    async def _run(self, call: ToolCall, offered: Sequence[str] | None) -> str:
        names = list(self.tools) if offered is None else list(offered)
        if call.name not in names:
            raise ToolError(f"there is no tool {call.name!r}; tools: {', '.join(names) or 'none'}")
        tool = self.tools[call.name]
        arguments = tool.as_stated(call.arguments) if call.untyped else call.arguments
        tool.check(arguments)
        async with self._gate.here():
            try:
                return await asyncio.wait_for(tool.call(arguments), None if tool.timed else self._timeout_s)
            except (SlimeError, TimeoutError):
                raise
            except Exception as error:  # an own tool may raise anything; the model is told, and the error is counted
                raise ToolError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the servers. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers = []


def open_tool(name: str, section: ToolsSection) -> Tool:
    """A built-in tool, or an own one by path."""
    if ":" in name or "." in name:
        return as_tool(load_object(name), name)
    make = look_up(BUILTIN, name, "tool", "tools: {known}, or file.py:function")
    tool: Tool = make(section)
    return tool
