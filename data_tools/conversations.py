"""Conversations for SFT: token ids of the whole conversation and which of them are trained on.

The mask comes from one rendering of the whole conversation, never from pieces glued together: a template may render a
turn differently when others follow it, and a tokenizer may merge across turns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slimecli.data_tools.columns import read_item, with_system_prompt
from slimecli.data_tools.formats import placed_rows
from slimecli.data_tools.prompts import render, require_template
from slimecli.errors import DataError
from slimecli.recipe_sections import DataSection
from slimecli.types import Message, Sample, SampleStatus

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LAST_TAG = re.compile(r"(<[^<>]+>)\s*$")
_PROBE = "zqprobezq"


def render_conversation(messages: list[Message], tokenizer: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    """Tokens of a conversation and the loss mask over them.

    Assistant turns are 1, their end-of-turn token included; everything else, headers included, is 0. A message with
    `step_loss_mask` other than 1 is left out of the loss. A template with `{% generation %}` marks its own spans; for
    any other the spans are found in the rendered text, between the assistant header and the end of the turn.

    Returns:
        tokens and mask, of equal length.
    """
    require_template(tokenizer)
    plain = [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in messages]
    trained = [m.get("step_loss_mask", 1) == 1 for m in messages if m["role"] == "assistant"]
    if not trained:
        raise DataError("the conversation has no assistant message", "SFT needs an answer to learn")
    if _GENERATION.search(tokenizer.chat_template):
        return _from_markers(plain, trained, tokenizer, tools)
    return _from_offsets(plain, trained, tokenizer, tools)


def _from_markers(
    messages: list[Message], trained: list[bool], tokenizer: Any, tools: Any
) -> tuple[list[int], list[int]]:
    out = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = list(out["input_ids"]), list(out["assistant_masks"])
    starts = [i for i, m in enumerate(mask) if m and (i == 0 or not mask[i - 1])]
    if len(starts) != len(trained):
        raise DataError(
            f"the chat template marks {len(starts)} generated spans for {len(trained)} assistant messages",
            "put {% generation %} around every assistant message of the template",
        )
    turn = -1
    for i, value in enumerate(mask):
        turn += int(i in starts) if value else 0
        mask[i] = int(bool(value) and trained[turn])
    return tokens, mask


@dataclass(frozen=True)
class _Markers:
    """How a template writes an assistant turn, found by rendering a probe."""

    header: str
    """text before every assistant turn"""
    prefix: str
    """what the generation prompt adds after the header (e.g. an opened think block); not generated, so not trained"""
    end: str
    """text that ends the turn"""


def _from_offsets(
    messages: list[Message], trained: list[bool], tokenizer: Any, tools: Any
) -> tuple[list[int], list[int]]:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "the chat template has no {% generation %} marks and the tokenizer gives no offsets",
            "use a fast tokenizer (tokenizer.json)",
        )
    text = render(tokenizer, messages, tools, "conversation")
    spans = _assistant_spans(text, len(trained), _probe_template(tokenizer, text, len(trained)))
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = list(out["input_ids"])
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)["input_ids"]
    if tokens != list(whole):
        raise DataError(
            "tokens of the rendered text differ from the tokens of the conversation",
            "the tokenizer adds tokens of its own; use one whose chat template writes them all",
        )
    kept = [span for span, keep in zip(spans, trained, strict=True) if keep]
    mask = [int(any(a < end and b > start for start, end in kept)) for a, b in out["offset_mapping"]]
    return tokens, mask


def _probe_template(tokenizer: Any, text: str, turns: int) -> _Markers:
    question = [{"role": "user", "content": "u"}]
    asked = render(tokenizer, question, None, "probe")
    prompted = render(tokenizer, question, None, "probe", add_generation_prompt=True)
    answered = render(tokenizer, [*question, {"role": "assistant", "content": _PROBE}], None, "probe")
    opening = prompted.removeprefix(asked)
    before, found, tail = answered.partition(_PROBE)
    if not prompted.startswith(asked) or not opening or not found or not tail.strip():
        raise DataError(
            "cannot tell from the chat template where an assistant turn begins and ends",
            "put {% generation %} marks around the assistant message in the template",
        )
    # what an answer begins with, too: a template may open a think block in the generation prompt alone
    shared = opening
    while not before.removeprefix(asked).startswith(shared):
        shared = shared[:-1]
    first_line = opening.partition("\n")[0] + "\n" if "\n" in opening else opening
    fitting = [h for h in (opening, shared, first_line) if h and text.count(h) == turns]
    header = fitting[0] if fitting else shared or first_line
    return _Markers(header, opening.removeprefix(header), tail.strip())


def render_answer(messages: list[Message], tokenizer: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    """Tokens of the prompt as RL renders it, then the last answer as it was written; only that is trained on.

    For templates that rewrite answers: those of reasoning models cut the thoughts out. What the generation prompt opens
    already (`<think>`) is taken from the answer.
    """
    require_template(tokenizer)
    if messages[-1]["role"] != "assistant" or not isinstance(messages[-1].get("content"), str):
        raise DataError(
            "the conversation does not end with an answer in text", "put it last, or data.loss_mask_type='turns'"
        )
    prompt = render(tokenizer, messages[:-1], tools, "conversation", add_generation_prompt=True)
    end = _probe_template(tokenizer, "", 0).end
    answer = messages[-1]["content"]
    opened = _LAST_TAG.search(prompt)
    if opened and answer.lstrip().startswith(opened[1]):
        answer = answer.lstrip().removeprefix(opened[1]).removeprefix("\n")
    head = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    tail = list(tokenizer(answer + end, add_special_tokens=False)["input_ids"])
    return [*head, *tail], [0] * len(head) + [1] * len(tail)


def _assistant_spans(text: str, turns: int, markers: _Markers) -> list[tuple[int, int]]:
    """Character spans [start, end) of the assistant turns, end marker included."""
    if text.count(markers.header) != turns:
        raise DataError(
            f"{markers.header!r} stands {text.count(markers.header)} times in a conversation with {turns} assistant "
            "messages",
            "a message contains the template's own marker, or the template leaves messages out: clean the data",
        )
    spans = []
    position = 0
    for _ in range(turns):
        start = text.index(markers.header, position) + len(markers.header)
        if markers.prefix and text.startswith(markers.prefix, start):
            start += len(markers.prefix)
        end = text.find(markers.end, start)
        if end < 0:
            raise DataError(f"an assistant turn does not end with {markers.end!r}", "check the chat template")
        position = end + len(markers.end)
        spans.append((start, position))
    return spans


def load_conversations(path: str, section: DataSection, tokenizer: Any) -> list[Sample]:
    """Finished samples for SFT, one per row with a conversation.

    `response_length` reaches from the first trained token to the end; reward 0.0, status completed.
    """
    samples = []
    for number, (where, row) in enumerate(placed_rows(path)):
        item = read_item(row, section, where, need="messages")
        messages = item.messages or []
        try:
            tokens, mask = tokens_and_mask(messages, item.tools, section, tokenizer)
        except DataError as error:
            raise DataError(f"{where}: {error.what}", error.fix) from error
        if 1 not in mask:
            raise DataError(f"{where}: no token is trained on", "check step_loss_mask of the assistant messages")
        length = len(mask) - mask.index(1)
        samples.append(
            Sample(
                group_index=number,
                index=number,
                prompt=messages,
                tokens=tokens,
                response=tokenizer.decode(tokens[-length:]),
                response_length=length,
                loss_mask=mask[-length:],
                label=item.label,
                reward=0.0,
                metadata=item.metadata | ({"tools": item.tools} if item.tools else {}),
                status=SampleStatus.COMPLETED,
            )
        )
    return samples


def _only_last(messages: list[Message]) -> list[Message]:
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    return [{**m, "step_loss_mask": 0} if m["role"] == "assistant" and i != last else m for i, m in enumerate(messages)]


def _require_qwen(tokenizer: Any, kind: str) -> None:
    require_template(tokenizer)
    header = render(tokenizer, [{"role": "user", "content": "u"}], None, "probe", add_generation_prompt=True)
    if "<|im_start|>assistant\n" not in header:
        raise DataError(
            f"data.loss_mask_type = {kind!r}, but the chat template does not open answers as Qwen's do",
            "use 'turns', which finds out how the template does it, or 'answer'",
        )


def tokens_and_mask(
    messages: list[Message], tools: Any, section: DataSection, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and its loss mask, as the recipe says."""
    if section.apply_chat_template:
        messages = with_system_prompt(messages, section.system_prompt)
        if section.loss_mask_type in ("answer", "distill_qwen"):
            return render_answer(messages, tokenizer, tools)
        if section.loss_mask_type.startswith("qwen"):
            _require_qwen(tokenizer, section.loss_mask_type)
        if section.loss_mask_type == "last":
            messages = _only_last(messages)
        return render_conversation(messages, tokenizer, tools)
    if [m["role"] for m in messages] != ["user", "assistant"]:
        raise DataError(
            "without a chat template a conversation is one user and one assistant message",
            "set data.apply_chat_template = true",
        )
    prompt = tokenizer(section.system_prompt + messages[0]["content"], add_special_tokens=False)["input_ids"]
    answer = tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"]
    answer = [*answer, tokenizer.eos_token_id]
    return [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
