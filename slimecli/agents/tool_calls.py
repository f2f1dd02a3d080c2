"""Tool calls in answers that may still be growing: where they begin, what of the text is content, how they are forced.

Reading them is the business of slimecli.tools.parsers. What cannot be read stays text, and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimecli.lookup import look_up
from slimecli.tools.parsers import ToolCall, load_parser

Schemas = Mapping[str, Mapping[str, Any]]
"""tool name -> JSON schema of its parameters"""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one family writes calls."""

    parser: str
    """of slimecli.tools.parsers"""
    markers: tuple[str, ...]
    """strings with which the part with calls begins"""
    close: str = ""
    """ends one call; a stop string where one call is all that is wanted. Empty: the format has no such string"""
    opening: str = ""
    """how a call begins, up to its arguments, with `{name}` for the tool; empty: calls cannot be forced"""
    at_start: bool = False
    """calls are the whole answer: a marker counts only at its very beginning"""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An answer taken apart."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    ill_formed: bool = False
    """it has the marker of a call that cannot be read"""


HERMES = ToolFormat(
    parser="hermes",
    markers=("<tool_call>",),
    close="</tool_call>",
    opening='<tool_call>\n{"name": "{name}", "arguments":',
)
QWEN3_CODER = ToolFormat(
    parser="qwen3_coder", markers=("<tool_call>",), close="</tool_call>", opening="<tool_call>\n<function={name}>\n"
)
LLAMA3 = ToolFormat(
    parser="llama3",
    markers=("<|python_tag|>", '{"name"'),
    opening='{"name": "{name}", "parameters":',
    at_start=True,
)
GLM = ToolFormat(parser="glm", markers=("<tool_call>",), close="</tool_call>", opening="<tool_call>{name}\n")
DEEPSEEK = ToolFormat(parser="deepseek", markers=("<｜tool▁calls▁begin｜>",), close="<｜tool▁call▁end｜>")
KIMI = ToolFormat(parser="kimi_k2", markers=("<|tool_calls_section_begin|>",), close="<|tool_call_end|>")
MISTRAL = ToolFormat(parser="mistral", markers=("[TOOL_CALLS]",))

FORMATS: dict[str, str] = {
    "hermes": "slimecli.agents.tool_calls:HERMES",
    "qwen3_coder": "slimecli.agents.tool_calls:QWEN3_CODER",
    "llama3": "slimecli.agents.tool_calls:LLAMA3",
    "glm": "slimecli.agents.tool_calls:GLM",
    "deepseek": "slimecli.agents.tool_calls:DEEPSEEK",
    "kimi": "slimecli.agents.tool_calls:KIMI",
    "mistral": "slimecli.agents.tool_calls:MISTRAL",
}
"""format -> where it is"""
FAMILIES: dict[str, str] = {
    "llama": "llama3",
    "mistral": "mistral",
    "mixtral": "mistral",
    "glm4": "glm",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "glm_moe_dsa": "glm",
    "deepseek_v3": "deepseek",
    "kimi_k2": "kimi",
}
"""model_type -> format; all others (Qwen, MiMo, Hermes tunes) write <tool_call>"""


def tool_format(family: str, template: str = "") -> ToolFormat:
    """The format of a model family; a tune whose chat template states <tool_call> has left its family's.

    Args:
        family: model_type of config.json.
        template: the tokenizer's chat template.
    """
    name = FAMILIES.get(family, "hermes")
    if name in ("llama3", "mistral", "deepseek") and "<tool_call>" in template:
        name = "hermes"
    if name == "hermes" and "<function=" in template:
        name = "qwen3_coder"
    found: ToolFormat = look_up(FORMATS, name, "tool format")
    return found


def schemas_of(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Tools as OpenAI states them -> their parameter schemas by name."""
    functions = [t.get("function", t) for t in tools or []]
    return {str(f.get("name")): f.get("parameters") or {} for f in functions}


def parse(text: str, how: ToolFormat, schemas: Schemas) -> Parsed:
    """Content before the calls, and the calls."""
    at = begin(text, how)
    if at < 0:
        return Parsed(content=text)
    found = load_parser(how.parser)(text[at:])
    if not found.calls:
        return Parsed(content=text, ill_formed=True)
    calls = [ToolCall(name=c.name, arguments=_typed(c.arguments, schemas.get(c.name, {}))) for c in found.calls]
    return Parsed(content=text[:at].rstrip(), calls=calls, ill_formed=bool(found.errors))


def _typed(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Formats that write values without quotes leave open whether 5 is a text: the tool's schema says so."""
    texts = {
        k for k, v in (schema.get("properties") or {}).items() if isinstance(v, dict) and v.get("type") == "string"
    }
    return {k: json.dumps(v) if k in texts and not isinstance(v, str) else v for k, v in arguments.items()}


def forced(how: ToolFormat, name: str) -> str:
    """What an answer that must call begins with: up to the name, or with it (empty: any tool)."""
    before, _, after = how.opening.partition("{name}")
    return f"{before}{name}{after}" if name else before


def begin(text: str, how: ToolFormat) -> int:
    """Where the part with calls begins; -1: there is none."""
    if how.at_start:
        bare = text.lstrip()
        return len(text) - len(bare) if bare.startswith(how.markers) else -1
    found = [place for marker in how.markers if (place := text.find(marker)) >= 0]
    return min(found, default=-1)


def visible(text: str, how: ToolFormat) -> str:
    """The part of an unfinished answer that is content whatever follows."""
    at = begin(text, how)
    if at >= 0:
        return text[:at].rstrip()
    if how.at_start:
        bare = text.lstrip()
        return "" if any(m.startswith(bare) for m in how.markers) else text
    held = max((n for m in how.markers for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
    return text[: len(text) - held].rstrip()
