"""Checks of generate functions and tools that need nothing but the recipe."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from slimecli.data_tools.formats import split_slice
from slimecli.errors import SlimeError, nearest
from slimecli.recipe import Recipe
from slimecli.recipe_tools import ToolsSection
from slimecli.rundir import RunDir
from slimecli.static import hook_problem, registry_names

TOOL_LOOP = "tool_loop"


def check_tools(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Generate functions exist, tools exist, and one goes with the other."""
    named = {"rollout.custom_generate": recipe.rollout.custom_generate}
    named |= {f"eval.sets.{name}.custom_generate": s.custom_generate or "" for name, s in recipe.eval.sets.items()}
    known = registry_names("slimecli.rollout.custom", "GENERATE")
    for field, name in named.items():
        if not name:
            continue
        if ":" in name or "." in name:
            if problem := hook_problem(name):
                yield f"`{field}` = {problem}"
        elif name not in known:
            close = nearest(name, known)
            yield f"`{field}` = {name!r} is unknown{close}; known: {', '.join(known)}, or file.py:function"
    tools = recipe.tools
    if TOOL_LOOP not in named.values():
        if tools != ToolsSection():
            yield f"`[tools]` has no effect without `rollout.custom_generate` = {TOOL_LOOP!r}"
        return
    if not tools.use and not tools.mcp:
        yield f"`rollout.custom_generate` = {TOOL_LOOP!r} without a tool: set `tools.use` or `tools.mcp`"
    if not recipe.data.apply_chat_template:
        yield f"`rollout.custom_generate` = {TOOL_LOOP!r} needs `data.apply_chat_template` = true"
    yield from _tool_problems(tools)


def _tool_problems(tools: ToolsSection) -> Iterator[str]:
    known = registry_names("slimecli.tools.builtin", "BUILTIN")
    for name in tools.use:
        if ":" in name or "." in name:
            if problem := hook_problem(name):
                yield f"`tools.use`: {problem}"
        elif name not in known:
            yield f"`tools.use`: no tool {name!r}{nearest(name, known)}; known: {', '.join(known)}, or file.py:function"
    if "search" in tools.use:
        yield from _corpus_problems(tools.corpus)
    elif tools.corpus:
        yield "`tools.corpus` has no effect without the tool `search` in `tools.use`"
    formats = ["auto", *registry_names("slimecli.tools.parsers", "PARSERS")]
    if tools.call_format not in formats:
        close = nearest(tools.call_format, formats)
        yield f"`tools.call_format` = {tools.call_format!r} is unknown{close}; known: {', '.join(formats)}"
    for name, command in tools.mcp.items():
        words = _words(command)
        if not words or shutil.which(words[0]) is None:
            yield f"`tools.mcp.{name}` = {command!r}: there is no program {words[0] if words else ''!r}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that is not closed
        return []


def _corpus_problems(corpus: str) -> Iterator[str]:
    if not corpus:
        yield "the tool `search` needs `tools.corpus`, a .jsonl or .parquet file with a column `text`"
        return
    try:
        path: Path = split_slice(corpus)[0]
    except SlimeError as error:
        yield f"`tools.corpus`: {error.what}"
        return
    if not path.is_file():
        yield f"`tools.corpus` = {corpus!r}: there is no such file"
