"""What the columns of a row mean: prompt, label, metadata, tools, conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slimecli.data_tools.formats import Row
from slimecli.errors import DataError, nearest
from slimecli.recipe_sections import DataSection
from slimecli.types import Message

ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A row with its columns read and checked."""

    prompt: str | list[Message] | None
    """text or chat messages; None when the row has none (SFT data)"""
    label: str | None
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    messages: list[Message] | None
    """a whole conversation, for SFT"""


def read_item(row: Row, section: DataSection, where: str, *, need: str = "prompt") -> Item:
    """Read the columns that the recipe names.

    Args:
        row: one row of a data file.
        section: which column is which.
        where: file and row number, for error texts.
        need: "prompt", "messages" or "any": which of the two columns must be there; empty: neither.
    """
    if section.convert:
        from slimecli.data_tools.converters import convert_row

        row = convert_row(row, section, where)
    has_messages = row.get(section.messages_key) is not None
    has_prompt = row.get(section.input_key) is not None
    if need == "prompt" or (need == "any" and not has_messages):
        require_column(row, section.input_key, "data.input_key", where)
    if need == "messages":
        require_column(row, section.messages_key, "data.messages_key", where)
    if section.label_key and need == "prompt":
        require_column(row, section.label_key, "data.label_key", where)
    return Item(
        prompt=_prompt(row[section.input_key], section.input_key, where) if has_prompt else None,
        label=_label(row.get(section.label_key)),
        metadata=_metadata(row.get(section.metadata_key), section.metadata_key, where),
        tools=_tools(row.get(section.tool_key), section.tool_key, where),
        messages=_messages(row[section.messages_key], section.messages_key, where) if has_messages else None,
    )


def require_column(row: Row, column: str, key: str, where: str) -> None:
    """Raise DataError with the columns that are there unless `column` is one of them."""
    if column in row:
        return
    present = sorted(row)
    extra = "; label_key = '' when the reward needs no label" if key == "data.label_key" else ""
    raise DataError(
        f"{where}: no column {column!r}{nearest(column, present)}; the columns are: {', '.join(present) or 'none'}",
        f"name the right one with --set {key}=COLUMN{extra}",
    )


def _prompt(value: Any, column: str, where: str) -> str | list[Message]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _messages(value, column, where)
    raise DataError(
        f"{where}: column {column!r} holds a {type(value).__name__}", "a prompt is text or a list of chat messages"
    )


def _messages(value: Any, column: str, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}",
            'a conversation is a list like [{"role": "user", "content": "..."}]',
        )
    out: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{where}: {column}[{number}] has no role", 'write {"role": "user", "content": "..."}')
        if message["role"] not in ROLES:
            raise DataError(
                f"{where}: {column}[{number}] has role {message['role']!r}{nearest(str(message['role']), list(ROLES))}",
                f"roles are: {', '.join(ROLES)}",
            )
        # parquet gives every message every key of the column's schema, null where it has none
        out.append({k: v for k, v in message.items() if v is not None})
    return out


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _metadata(value: Any, column: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise DataError(f"{where}: column {column!r} holds a {type(value).__name__}", "metadata is a JSON object")


def _tools(value: Any, column: str, where: str) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: column {column!r} is not JSON: {error.msg} at character {error.pos + 1}",
                "tools are a JSON list of function definitions",
            ) from None
    if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
        raise DataError(f"{where}: column {column!r} is not a list of objects", "tools are a JSON list of functions")
    return value


def with_template(messages: list[Message], template: str) -> list[Message]:
    """Put the recipe's prompt template around the last user message, where that is text."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    if not template or last < 0 or not isinstance(messages[last].get("content"), str):
        return messages
    asked = {**messages[last], "content": around(messages[last]["content"], template)}
    return [*messages[:last], asked, *messages[last + 1 :]]


def around(text: str, template: str) -> str:
    """The template with the text where it says {prompt}; its other braces (LaTeX) mean nothing."""
    return template.replace("{prompt}", text) if template else text


def with_system_prompt(messages: list[Message], system_prompt: str) -> list[Message]:
    """Put the recipe's system prompt first; a conversation that has its own keeps it."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
