"""Tool calls as models write them. PARSERS: format -> function of an answer's text.

A parser never raises: a call that cannot be read becomes an entry of `errors`, for the model to be told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slimecli.lookup import look_up

THINK_END = "</think>"


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    untyped: bool = field(default=False, compare=False)
    """its format has no types: a text that looks like a number was taken for one"""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An answer, taken apart."""

    text: str
    """what is said besides the calls"""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """why calls could not be read"""


Parser = Callable[[str], Parsed]

PARSERS: dict[str, str] = {
    "hermes": "slimecli.tools.parsers:hermes",
    "qwen": "slimecli.tools.parsers:hermes",
    "qwen3_coder": "slimecli.tools.parsers:qwen3_coder",
    "llama3": "slimecli.tools.parsers:llama3",
    "glm": "slimecli.tools.parsers:glm",
    "deepseek": "slimecli.tools.parsers:deepseek",
    "mistral": "slimecli.tools.parsers:mistral",
    "kimi_k2": "slimecli.tools.parsers:kimi_k2",
}
"""format -> function; `auto` looks at the chat template"""

_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|eom_id|>", "llama3"),
    ('"parameters": ', "llama3"),
)
"""what stands in a chat template -> its format; the first that is found counts"""


def load_parser(name: str, chat_template: str = "") -> Parser:
    """The parser of a format; for `auto` the one whose marks stand in the chat template, else hermes."""
    if name == "auto":
        name = next((form for mark, form in _MARKS if mark in chat_template), "hermes")
    found: Parser = look_up(PARSERS, name, "tool call format", "formats: auto, {known}")
    return found


def split_reasoning(text: str) -> tuple[str, str]:
    """(thinking, what is said after it). Thinking that does not end leaves nothing said."""
    head, mark, said = text.rpartition(THINK_END)
    if mark:
        return head.partition("<think>")[2] if "<think>" in head else head, said
    before, mark, thinking = text.partition("<think>")
    return (thinking, before) if mark else ("", text)


def hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write it."""
    return _blocks(text, "<tool_call>", "</tool_call>", _json_call)


def qwen3_coder(text: str) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as Qwen3-Coder and 3.5."""
    return _blocks(text, "<tool_call>", "</tool_call>", _xml_call)


def glm(text: str) -> Parsed:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, as GLM-4.5 and later."""
    return _blocks(text, "<tool_call>", "</tool_call>", _glm_call)


def deepseek(text: str) -> Parsed:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` (V3.1), and V3's and R1's with a JSON fence."""
    said, _, calls = text.partition("<｜tool▁calls▁begin｜>")
    parsed = _blocks(
        calls.partition("<｜tool▁calls▁end｜>")[0], "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call
    )
    return Parsed(text=said.strip(), calls=parsed.calls, errors=parsed.errors)


def kimi_k2(text: str) -> Parsed:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    said, _, calls = text.partition("<|tool_calls_section_begin|>")
    parsed = _blocks(calls, "<|tool_call_begin|>", "<|tool_call_end|>", _kimi_call)
    return Parsed(text=said.strip(), calls=parsed.calls, errors=parsed.errors)


def mistral(text: str) -> Parsed:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    said, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    errors: list[str] = []
    for part in parts:
        name, args, body = part.partition("[ARGS]")
        try:
            if args:
                calls.append(_call({"name": name.strip(), "arguments": _first_json(body.strip())[0]}))
            else:
                data = _first_json(part.strip())[0]
                calls += [_call(item) for item in (data if isinstance(data, list) else [data])]
        except ValueError as error:
            errors.append(_told(part, error))
    return Parsed(text=said.strip(), calls=tuple(calls), errors=tuple(errors))


def llama3(text: str) -> Parsed:
    """The whole answer is `{"name": ..., "parameters": {...}}`, several divided by `;`, with or without the tag."""
    body = text.replace("<|python_tag|>", "").strip()
    if not body.startswith("{"):
        return Parsed(text=text.strip())
    calls: list[ToolCall] = []
    while body:
        try:
            data, end = _first_json(body)
            calls.append(_call(data))
        except ValueError as error:
            return Parsed(text="", calls=tuple(calls), errors=(_told(body, error),))
        body = body[end:].lstrip("; \n\t")
    return Parsed(text="", calls=tuple(calls))


def _blocks(text: str, begin: str, end: str, read: Callable[[str], ToolCall]) -> Parsed:
    """Calls between two marks. A last one that is not closed counts as well: its end may be the stop string."""
    said, *parts = text.split(begin)
    calls: list[ToolCall] = []
    errors: list[str] = []
    for part in parts:
        body, _, rest = part.partition(end)
        said += rest
        try:
            calls.append(read(body.strip()))
        except ValueError as error:
            errors.append(_told(body, error))
    return Parsed(text=said.strip(), calls=tuple(calls), errors=tuple(errors))


def _told(body: str, error: Exception) -> str:
    shown = body.strip()
    return f"the tool call {shown[:120]!r}{'...' if len(shown) > 120 else ''} cannot be read: {error}"


def _loads(text: str) -> Any:
    """JSON; what cannot be read is a ValueError, too many brackets included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _json_call(body: str) -> ToolCall:
    return _call(_loads(body))


def _call(data: Any) -> ToolCall:
    """A call from {"name", "arguments" or "parameters"}; arguments may be JSON inside a string, as OpenAI's are."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        raise ValueError('it is no JSON object with a "name"')
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no JSON object")
    return ToolCall(name=data["name"], arguments=arguments)


def _first_json(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_SPACE = re.compile(r"\s*")


def _xml_call(body: str) -> ToolCall:
    rest = body.partition("<function=")[2]
    name, closed, inner = rest.partition(">")
    if not closed or not _is_name(name):
        raise ValueError("it has no <function=NAME>")
    arguments: dict[str, Any] = {}
    for part in inner.partition("</function>")[0].split("<parameter=")[1:]:
        key, closed, value = part.partition(">")
        if closed and _is_name(key):
            arguments[key] = _plain_or_json(value.partition("</parameter>")[0])
    return ToolCall(name=name, arguments=arguments, untyped=True)


def _is_name(text: str) -> bool:
    return bool(text) and not any(c.isspace() for c in text)


def _glm_call(body: str) -> ToolCall:
    name = body.partition("<arg_key>")[0].strip()
    if not name or any(c in name for c in "<>{}\n"):
        raise ValueError("it does not begin with the name of a tool")
    arguments = {k.strip(): _plain_or_json(v) for k, v in _glm_arguments(body)}
    return ToolCall(name=name, arguments=arguments, untyped=True)


def _glm_arguments(body: str) -> Iterator[tuple[str, str]]:
    """Keys and values, in one pass: a model that repeats a mark ten thousand times must not hold up the others."""
    begin = body.find("<arg_key>")
    while begin >= 0:
        end = body.find("</arg_key>", begin)
        if end < 0:
            return
        value = _SPACE.match(body, end + len("</arg_key>")).end()  # type: ignore[union-attr]  # it matches anywhere
        after = end
        if body.startswith("<arg_value>", value):
            value += len("<arg_value>")
            after = body.find("</arg_value>", value)
            if after < 0:
                return
            yield body[begin + len("<arg_key>") : end], body[value:after]
        begin = body.find("<arg_key>", after)


def _deepseek_call(body: str) -> ToolCall:
    name, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        raise ValueError("it has no <｜tool▁sep｜>")
    if name.strip() == "function" and "```" in rest:
        name, _, rest = rest.partition("```json" if "```json" in rest else "```")
        rest = rest.partition("```")[0]
    return _call({"name": name.strip(), "arguments": _loads(rest)})


def _kimi_call(body: str) -> ToolCall:
    name, mark, rest = body.partition("<|tool_call_argument_begin|>")
    if not mark:
        raise ValueError("it has no <|tool_call_argument_begin|>")
    return _call({"name": name.strip().removeprefix("functions.").partition(":")[0], "arguments": _loads(rest)})


def _plain_or_json(value: str) -> Any:
    """A value between tags: JSON where it is a number, a list, an object, true, false or null, else the text itself.

    One line break at either side belongs to the tags.
    """
    text = value.removeprefix("\n").removesuffix("\n")
    try:
        found = _loads(text)
    except ValueError:
        return text
    return text if isinstance(found, str) else found
