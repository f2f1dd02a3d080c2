"""What a tool is, and tools made of plain Python functions."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimecli.data_tools.rewards.threads import in_thread
from slimecli.errors import SlimeError, UsageError

_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_CHECKS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(SlimeError):
    """A call that did not work; its text is told to the model."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Something that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments"""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """arguments -> output; raises ToolError for what the model is to be told"""
    timed: bool = False
    """keeps the deadline itself, and tells what there was until then"""

    def schema(self) -> dict[str, Any]:
        """As chat templates take it: OpenAI's function format."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def _type_of(self, argument: str) -> Any:
        """JSON schema's `type` of an argument; None where the schema leaves it open, as `true` does."""
        stated = self.parameters.get("properties", {}).get(argument)
        return stated.get("type") if isinstance(stated, Mapping) else None

    def as_stated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call without types, as the schema has them: what is to be a string becomes one again."""
        texts = [name for name in arguments if self._type_of(name) == "string"]
        return {k: json.dumps(v) if k in texts and not isinstance(v, str) else v for k, v in arguments.items()}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ToolError unless the arguments have the names and types that the schema asks for."""
        properties = self.parameters.get("properties", {})
        missing = [name for name in self.parameters.get("required", []) if name not in arguments]
        if missing:
            raise ToolError(f"{self.name} lacks the argument {', '.join(missing)}")
        unknown = [name for name in arguments if name not in properties]
        if unknown and not self.parameters.get("additionalProperties", False):
            raise ToolError(
                f"{self.name} has no argument {', '.join(unknown)}; it has {', '.join(properties) or 'none'}"
            )
        for name, value in arguments.items():
            wanted = self._type_of(name)
            kinds = [wanted] if isinstance(wanted, str) else wanted or []
            if kinds and not any(_is_a(value, kind) for kind in kinds):
                raise ToolError(f"{self.name}: {name} must be {' or '.join(kinds)}, not {json.dumps(value)[:80]}")


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _CHECKS.get(kind, (object,)))


def as_tool(made: Any, path: str) -> Tool:
    """A Tool as it is, or one made of a function: name, first words of its docstring, types of its parameters.

    A parameter is described by a line `name: what it is` in the docstring. A plain function runs in a thread.
    """
    if isinstance(made, Tool):
        return made
    if not callable(made):
        raise UsageError(f"{path!r} is a {type(made).__name__}, not a tool", "name a function, or a slimecli Tool")
    name = str(getattr(made, "__name__", type(made).__name__))
    doc = inspect.getdoc(made) or ""
    if not doc:
        raise UsageError(f"the tool {path!r} has no docstring", "the model reads it: say in it what the tool does")
    return Tool(
        name=name,
        description=doc.partition("\n\n")[0].replace("\n", " "),
        parameters=_parameters(made, doc, path),
        call=_caller(made),
    )


def _caller(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Awaitable[str]]:
    async def call(arguments: dict[str, Any]) -> str:
        if inspect.iscoroutinefunction(function):
            return as_text(await function(**arguments))
        return as_text(await in_thread(lambda: function(**arguments)))

    return call


def as_text(value: Any) -> str:
    """What a tool gave, as the model sees it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _parameters(function: Callable[..., Any], doc: str, path: str) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise UsageError(f"the types of the tool {path!r} cannot be read: {error}", "name types that exist") from None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        described = re.search(rf"^\s*{name}: (.+)$", doc, re.MULTILINE)
        kinds = _kinds(hints.get(name))
        properties[name] = ({"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else {}) | (
            {"description": described[1].strip()} if described else {}
        )
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _kinds(hint: Any) -> list[str]:
    """JSON types of an annotation; [] for any."""
    if hint in _TYPES:
        return [_TYPES[hint]]
    if hint is type(None):
        return ["null"]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    if origin in _TYPES:
        return [_TYPES[origin]]
    if origin is Sequence:
        return ["array"]
    return []
