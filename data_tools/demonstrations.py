"""Written answers for generated tasks, so that a model can be warmed up by SFT before RL.

DEMONSTRATIONS: name -> function(row, rng, **args) -> answer text, or the messages from the first answer on. `rng` is
seeded per row, so a row's answer depends on nothing but the run's seed and the row's place.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from slimecli.data_tools.formats import Row
from slimecli.errors import DataError, UsageError, nearest
from slimecli.lookup import look_up
from slimecli.types import Message

DEMONSTRATIONS: dict[str, str] = {
    "direct": "slimecli.data_tools.demonstrations:direct",
    "column_addition": "slimecli.data_tools.demonstrations:column_addition",
    "reverse_steps": "slimecli.data_tools.demonstrations:reverse_steps",
    "calculator_call": "slimecli.data_tools.demonstrations:calculator_call",
}

Writer = Callable[[Row, Random], str | list[Message]]


def load_demonstration(name: str, args: dict[str, Any]) -> Writer:
    """The writer of that name with its arguments bound."""
    function = _writer(name)
    known = list(inspect.signature(function).parameters)[2:]
    for key in args:
        if key not in known:
            raise UsageError(
                f"data.demonstration_args: {name} has no argument {key!r}{nearest(key, known)}",
                f"its arguments: {', '.join(known) or 'none'}",
            )
    return lambda row, rng: function(row, rng, **args)


def direct(row: Row, rng: Random) -> str:
    """The answer alone."""
    return str(row["label"])


def column_addition(row: Row, rng: Random, direct: float = 0.6) -> str:
    """Addition of two numbers, column by column from the right with the carry; the sum ends the text.

    Example: 47 + 85 -> "7+5=12 4+8+1=13 =132"; the share `direct` of rows answers "132" only.
    """
    entry = row["metadata"]["reasoning_gym"]["entry"]
    match = re.fullmatch(r"\s*(\d+) \+ (\d+)\s*", str(entry["metadata"].get("expression", "")))
    if match is None:
        raise DataError(
            f"column_addition cannot show {entry['question']!r}: it adds two non-negative numbers",
            'use basic_arithmetic with min_terms = max_terms = 2, operators = ["+"], allow_parentheses = false',
        )
    if rng.random() < direct:
        return str(row["label"])
    return " ".join([*_columns(match[1], match[2]), f"={row['label']}"])


def _columns(a: str, b: str) -> list[str]:
    width = max(len(a), len(b))
    carry, steps = 0, []
    for x, y in zip(reversed(a.zfill(width)), reversed(b.zfill(width)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return steps


def reverse_steps(row: Row, rng: Random, direct: float = 0.6) -> str:
    """A word spelled backward, letter by letter from its end; the word ends the text.

    Example: neon -> "n o e n noen"; the share `direct` of rows answers "noen" only.
    """
    answer = str(row["label"])
    if rng.random() < direct:
        return answer
    return " ".join([*answer, answer])


def calculator_call(row: Row, rng: Random, direct: float = 0.5) -> str | list[Message]:
    """A call of the tool `calculator` with the task's expression, its output, and the output as the answer.

    Example: 47 * 85 -> <tool_call>{"name": "calculator", "arguments": {"expression": "47 * 85"}}</tool_call>, the tool
    says 3995, and the answer is 3995; the share `direct` of rows answers at once.
    """
    entry = row["metadata"]["reasoning_gym"]["entry"]
    expression = str(entry["metadata"].get("expression", "")).strip()
    if not expression:
        raise DataError(f"calculator_call cannot show {entry['question']!r}: it has no expression", "use arithmetic")
    if rng.random() < direct:
        return str(row["label"])
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": str(row["label"])},
        {"role": "assistant", "content": str(row["label"])},
    ]


def describe(name: str) -> str:
    """First line of a writer's description."""
    return (inspect.getdoc(_writer(name)) or "").partition("\n")[0]


def _writer(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = look_up(
        DEMONSTRATIONS, name, "demonstrations", "known: {known}; `slime prepare-data --list`"
    )
    return found
