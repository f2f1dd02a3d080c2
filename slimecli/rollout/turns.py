"""A conversation as the engine sees it: token ids that only grow, beside the messages that they stand for.

What the model said stays the ids that it said. What comes after is the difference that the chat template makes: the
template renders the whole conversation, which must begin with the text held so far, and only the rest is tokenized.
Where it does not begin with it (a template that drops earlier thinking, or writes a tool call in another way), the
template has *broken* the prefix, and the conversation goes on from what the template says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from slimecli.data_tools.prompts import render
from slimecli.types import Message

WHERE = "a turn of the conversation"


class Conversation:
    """One conversation.

    Args:
        tokenizer: with a chat template.
        messages: everything before the model's first turn.
        tools: schemas that the template shows.
        end_ids: tokens that end a turn.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Message], tools: list[dict[str, Any]], end_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.tools = tools or None
        """what the template shows"""
        self._asked = len(messages)
        self._end_ids = frozenset(end_ids)
        self._end_text = ""
        """how the last turn ended, where it ended with an end token"""
        self.messages: list[Message] = list(messages)
        self.text = self._render(self.messages)
        """text of ids; after a turn without its end token"""
        self.ids = self._tokenize(self.text)
        """[tokens] what the engine is given next"""

    @property
    def answers(self) -> list[Message]:
        """Everything since the model's first turn, that one included."""
        return self.messages[self._asked :]

    def say(self, output_ids: Sequence[int]) -> str:
        """Add a turn of the model; returns its text without the token that ended it."""
        said, end = list(output_ids), []
        if said and said[-1] in self._end_ids:
            said, end = said[:-1], said[-1:]
        content = self._decode(said)
        self._end_text = self._decode(end)
        self.ids = [*self.ids, *output_ids]
        self.text += content
        self.messages.append({"role": "assistant", "content": content})
        return content

    def hear(self, messages: Sequence[Message], calls: Sequence[dict[str, Any]] = (), text: str = "") -> bool:
        """Add what others say to the model's last turn; False where the template broke the prefix.

        Args:
            messages: e.g. tool outputs.
            calls: the last turn's tool calls and
            text: its words besides them, for templates that write calls themselves. They are used only if the
                template, given the turn as it was said, breaks the prefix, and given these does not.
        """
        turn = self.messages[-1]
        versions = [turn] + ([{**turn, "content": text, "tool_calls": list(calls)}] if calls else [])
        for version in versions:
            told = [*self.messages[:-1], version, *messages]
            full = self._render(told)
            rest = self._rest(full)
            if rest is not None:
                self.messages, self.text = told, full
                self.ids = [*self.ids, *self._tokenize(rest)]
                return True
        self.messages = [*self.messages, *messages]
        self.text = self._render(self.messages)
        self.ids = self._tokenize(self.text)
        return False

    def _rest(self, full: str) -> str | None:
        """What a rendered conversation says beyond what is held; None if it does not begin with that."""
        if not full.startswith(self.text):
            return None
        rest = full[len(self.text) :]
        return rest.removeprefix(self._end_text) if rest.startswith(self._end_text) else None

    def _render(self, messages: list[Message]) -> str:
        return render(self._tokenizer, messages, self.tools, WHERE, add_generation_prompt=True)

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
