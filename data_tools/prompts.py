"""Prompts as the engine gets them: rendered with the chat template and tokenized once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slimecli.data_tools.columns import Item, around, read_item, with_system_prompt, with_template
from slimecli.data_tools.formats import Row, placed_rows
from slimecli.data_tools.selection import PROMPT_MESSAGES
from slimecli.errors import DataError
from slimecli.recipe_sections import DataSection
from slimecli.types import Message, Sample


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt."""

    text: str
    token_ids: tuple[int, ...]
    label: str | None
    metadata: dict[str, Any]
    messages: tuple[Message, ...] = ()
    """what was rendered; empty for prompts that are used verbatim"""


def load_prompts(path: str, section: DataSection, tokenizer: Any) -> list[Prompt]:
    """Read and render all prompts of a file (.jsonl or .parquet, with optional slice)."""
    return render_rows(placed_rows(path), section, tokenizer)


def render_rows(rows: Iterable[tuple[str, Row]], section: DataSection, tokenizer: Any) -> list[Prompt]:
    """Render rows, each with its place for error texts.

    A prompt over `max_prompt_tokens` is an error: prepare-data drops and counts those, nobody else may.
    """
    prompts = []
    too_long: list[str] = []
    for where, prompt in _rendered(rows, section, tokenizer):
        if len(prompt.token_ids) > section.max_prompt_tokens:
            too_long.append(f"{where} ({len(prompt.token_ids)} tokens)")
        prompts.append(prompt)
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(prompts)} prompts are longer than {section.max_prompt_tokens} tokens, "
            f"the first: {too_long[0]}",
            "drop them with `slime prepare-data`, or raise data.max_prompt_tokens",
        )
    return prompts


def _rendered(rows: Iterable[tuple[str, Row]], section: DataSection, tokenizer: Any) -> Iterator[tuple[str, Prompt]]:
    if section.workers:
        from slimecli.data_tools.workers import render_in_processes

        yield from render_in_processes(rows, section, tokenizer)
        return
    for where, row in rows:
        yield where, render_row(row, section, tokenizer, where)


def render_row(row: Row, section: DataSection, tokenizer: Any, where: str) -> Prompt:
    """One row as the engine gets it, however long."""
    item = read_item(row, section, where)
    messages = prompt_messages(item, section, tokenizer, where)
    text = _render_prompt(item, messages, section, tokenizer, where)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise DataError(f"{where}: the prompt is empty", "`slime prepare-data` drops and counts such rows")
    metadata = item.metadata | ({"tools": item.tools} if item.tools else {})
    return Prompt(text, ids, item.label, metadata, tuple(messages))


def as_asked(row: Row, section: DataSection, tokenizer: Any, where: str) -> Sample:
    """One row as a pending sample that carries its prompt as chat messages, for answers that become conversations.

    Raises DataError for a prompt over `max_prompt_tokens`.
    """
    prompt = render_row(row, section, tokenizer, where)
    if len(prompt.token_ids) > section.max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {len(prompt.token_ids)} tokens, more than {section.max_prompt_tokens}",
            "raise data.max_prompt_tokens; --set data.skip_broken=true leaves such rows out and counts them",
        )
    messages = [dict(m) for m in prompt.messages] or [{"role": "user", "content": prompt.text}]
    metadata = prompt.metadata | {PROMPT_MESSAGES: messages}
    return Sample(prompt=prompt.text, tokens=list(prompt.token_ids), label=prompt.label, metadata=metadata)


def render_prompt(item: Item, section: DataSection, tokenizer: Any, where: str) -> str:
    """The text that the model continues."""
    return _render_prompt(item, prompt_messages(item, section, tokenizer, where), section, tokenizer, where)


def prompt_messages(item: Item, section: DataSection, tokenizer: Any, where: str) -> list[Message]:
    """What the chat template is given; empty where prompts are used verbatim."""
    if item.prompt is None:
        raise DataError(f"{where}: no prompt", f"fill column {section.input_key!r}")
    if not section.apply_chat_template:
        return []
    require_template(tokenizer)
    messages = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
    messages = with_template(messages, section.prompt_template)
    return with_system_prompt(messages, section.system_prompt)


def _render_prompt(item: Item, messages: list[Message], section: DataSection, tokenizer: Any, where: str) -> str:
    if messages:
        return render(tokenizer, messages, item.tools, where, add_generation_prompt=True)
    if not isinstance(item.prompt, str):
        raise DataError(f"{where}: the prompt is a list of messages", "set data.apply_chat_template = true")
    return section.system_prompt + around(item.prompt, section.prompt_template)


def render(tokenizer: Any, messages: Any, tools: Any, where: str, **kwargs: Any) -> str:
    """Chat template -> text; what the template refuses is a DataError."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs))
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{where}: the chat template refuses the messages: {error}", "check roles, their order and the contents"
        ) from error


def require_template(tokenizer: Any) -> None:
    """Raise unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template",
            "use an instruction-tuned model's tokenizer, or set data.apply_chat_template = false",
        )
