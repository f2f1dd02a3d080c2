"""slime's helpers about tokenizers and loss masks."""

from __future__ import annotations

from typing import Any

from slimecli.data_tools.conversations import render_conversation
from slimecli.errors import SlimeError
from slimecli.types import Message


class MultiTurnLossMaskGenerator:
    """Tokens and loss masks of conversations; the kind of template is seen from the template itself."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(self, messages: list[Message], tools: Any = None) -> tuple[list[int], list[int]]:
        """Token ids, and 1 for those of assistant turns."""
        return render_conversation(messages, self.tokenizer, tools)

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Tokens from the first trained one to the end."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The texts that are trained on."""
        texts: list[str] = []
        run: list[int] = []
        for token, mask in zip([*token_ids, 0], [*loss_masks, 0], strict=True):
            if mask:
                run.append(token)
            elif run:
                texts.append(str(self.tokenizer.decode(run)))
                run = []
        return texts


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Tokens from the first trained one to the end."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Of a text model there is none."""
    return None


def encode_image_for_rollout_engine(image: Any) -> str:
    """An image as engines take it."""
    raise SlimeError("images are not supported by slimecli's rollout", "use a text model")
