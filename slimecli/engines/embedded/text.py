"""Tokenizer calls that are safe from two threads, and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded.request import BadRequest

RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""arguments of apply_chat_template, not variables of a template: a template is a program, and the model's alone runs"""


MASKS = 256
"""sets of stop strings whose masks are kept"""


class TextCodec:
    """Text to ids and back; without a tokenizer, ids only."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.tokenizer = _load_tokenizer(folder)
        self.vocab = vocab
        # the wrapper changes the backend's truncation settings on some calls, which two threads must not do at once
        self._backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self._pieces: list[str] = []
        self._masks: dict[tuple[str, ...], torch.Tensor] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids, special tokens added as the tokenizer does by itself."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text).ids
            return ids
        if self.tokenizer is None:
            raise BadRequest("this model folder has no tokenizer", "send input_ids instead of text")
        plain: list[int] = self.tokenizer.encode(text)
        return plain

    def decode(self, batch: list[list[int]], skip_special: bool) -> list[str]:
        """Texts of several answers."""
        if self._backend is not None:
            texts: list[str] = self._backend.decode_batch(batch, skip_special_tokens=skip_special)
            return texts
        if self.tokenizer is None:
            return [""] * len(batch)
        return [self.tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in batch]

    def chat(self, messages: list[dict[str, Any]], tools: Any, extra: dict[str, Any]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        return self.ids(self.render(messages, tools=tools, **extra))

    def render(self, messages: list[dict[str, Any]], **extra: Any) -> str:
        """A conversation as the chat template writes it, ready for the assistant's turn.

        Args:
            extra: `tools`, and further variables of the template.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise BadRequest("this model folder has no chat template", "use /v1/completions or /generate")
        settings = {"add_generation_prompt": True, **extra}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **settings))
        except (
            Exception
        ) as error:  # templates are programs and raise what they like; the caller's messages are at fault
            raise BadRequest(f"the chat template refuses these messages: {error}") from None

    def ids(self, text: str) -> list[int]:
        """Token ids of text that is rendered already: no special token is added."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        plain: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return plain

    def stop_mask(self, stops: tuple[str, ...]) -> torch.Tensor:
        """[vocab] bool: tokens that can complete one of the stop strings, so that others need no decoding."""
        found = self._masks.pop(stops, None)
        if found is None:
            if self.tokenizer is None:
                raise BadRequest("stop strings need a tokenizer", "use stop_token_ids")
            found = torch.tensor([_may_end(piece, stops) for piece in self._vocabulary()])
        self._masks[stops] = found
        if len(self._masks) > MASKS:  # callers choose their stop strings: the longest out of use goes
            self._masks.pop(next(iter(self._masks)), None)
        return found

    def _vocabulary(self) -> list[str]:
        if not self._pieces:
            texts = self.decode([[i] for i in range(self.vocab)], skip_special=False)
            raw = self.tokenizer.convert_ids_to_tokens(list(range(self.vocab)))
            # a SentencePiece token decoded alone loses its leading space
            self._pieces = [
                f" {text}" if str(token).startswith("▁") else text for text, token in zip(texts, raw, strict=True)
            ]
        return self._pieces


def _may_end(piece: str, stops: tuple[str, ...]) -> bool:
    # U+FFFD stands for a part of a character: what it completes is known in context only
    return "\ufffd" in piece or any(stop[-1] in piece for stop in stops)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(position, stop string) of the earliest match."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found) if found else None


def _load_tokenizer(folder: Path) -> Any:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
