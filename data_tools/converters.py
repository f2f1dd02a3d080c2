"""Rows of well-known sets as slime's columns. CONVERTERS: name -> Converter.

A converted row has `prompt`, `label`, and where there is more to say `metadata` and `tools`. `rng` is seeded by the row
itself, so that what it decides (the order of choices) depends on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from slimecli.data_tools.formats import Row
from slimecli.data_tools.hooks import load_hook
from slimecli.data_tools.rewards.extract import extract_boxed
from slimecli.errors import DataError
from slimecli.lookup import look_up
from slimecli.recipe_sections import DataSection
from slimecli.seeds import derive_seed


@dataclass(frozen=True)
class Converter:
    """How rows of one layout are read."""

    columns: tuple[str, ...]
    """what a raw row has; one without all of them counts as converted already"""
    convert: Callable[[Row, Random], Row]
    what: str
    """one line for `slime prepare-data --list`"""


def convert_row(row: Row, section: DataSection, where: str) -> Row:
    """The row under the recipe's own column names; one that was converted before stays as it is."""
    converter = load_converter(section.convert)
    if not all(column in row for column in converter.columns):
        if section.input_key in row or section.messages_key in row:
            return row
        raise DataError(
            f"{where}: data.convert = {section.convert!r} reads the columns {', '.join(converter.columns)}; "
            f"the row has {', '.join(sorted(row)) or 'none'}",
            "bring the set in its published layout, or set data.convert='' and name the columns",
        )
    try:
        made = converter.convert(row, Random(derive_seed(0, "convert", json.dumps(row, sort_keys=True, default=str))))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{where}: {section.convert} cannot convert the row: {type(error).__name__}: {error}", "look at the row"
        ) from error
    names = {
        "prompt": section.input_key,
        "label": section.label_key or "label",
        "metadata": section.metadata_key,
        "tools": section.tool_key,
        "messages": section.messages_key,
    }
    return {names.get(key, key): value for key, value in made.items()}


@cache
def load_converter(name: str) -> Converter:
    """A built-in converter, or a user's function (row, rng) -> row, which sees every row."""
    if ":" not in name and "." not in name:
        found: Converter = look_up(CONVERTERS, name, "converter", "converters: {known}, or file.py:function")
        return found
    return Converter((), load_hook(name, ("row", "rng")), "")


def _gsm8k(row: Row, rng: Random) -> Row:
    solution, mark, answer = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("the answer has no ####")
    return _item("gsm8k", row["question"], answer.strip().replace(",", ""), solution=solution.strip())


def _math(row: Row, rng: Random) -> Row:
    answer = row.get("answer") or extract_boxed(str(row["solution"]))
    if not answer:
        raise ValueError("the solution has no \\boxed answer")
    extra = {k: row[k] for k in ("level", "type", "subject") if row.get(k)}
    return _item("math", row["problem"], str(answer), **extra)


def _verl(row: Row, rng: Random) -> Row:
    truth = row["reward_model"]["ground_truth"]
    golds = truth.get("target", truth) if isinstance(truth, dict) else truth
    golds = [str(g) for g in golds] if isinstance(golds, list) else [str(golds)]
    made = _item(str(row.get("data_source") or "verl"), row["prompt"], golds[0])
    if len(golds) > 1:
        made["metadata"]["golds"] = golds
    return made


def _qa(row: Row, rng: Random) -> Row:
    golds = [str(g) for g in row["golden_answers"]]
    source = str(row.get("data_source") or "qa")
    return _item(source, row["question"], golds[0], golds=golds, extract="answer_tag")


def _gpqa(row: Row, rng: Random) -> Row:
    wrong = [str(row[f"Incorrect Answer {i}"]).strip() for i in (1, 2, 3)]
    right = str(row["Correct Answer"]).strip()
    choices = [right, *wrong]
    rng.shuffle(choices)
    letters = "ABCD"
    question = "\n".join(
        [str(row["Question"]).strip(), "", *(f"{x}) {c}" for x, c in zip(letters, choices, strict=True))]
    )
    letter = letters[choices.index(right)]
    return _item("gpqa", question, letter, choices=choices, correct_letter=letter, valid_letters=list(letters))


def _tool_calls(row: Row, rng: Random) -> Row:
    tools, answers = (json.loads(v) if isinstance(v, str) else v for v in (row["tools"], row["answers"]))
    calls = [{"name": a["name"], "arguments": a["arguments"]} for a in answers]
    made = _item("tool_calls", row["query"], json.dumps(calls, ensure_ascii=False, sort_keys=True))
    return made | {"tools": [_function(tool) for tool in tools]}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as chat templates take it; xLAM states parameters as name -> {type, description, default}."""
    parameters = tool.get("parameters") or {}
    if "properties" not in parameters:
        needed = [name for name, p in parameters.items() if "default" not in p and "optional" not in str(p.get("type"))]
        properties = {
            name: {k: v for k, v in p.items() if k != "type"} | {"type": _type(str(p.get("type", "str")))}
            for name, p in parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": needed}
    stated = {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": stated}


def _type(stated: str) -> str:
    """JSON schema's name of a Python type as xLAM writes it, e.g. `int, optional` or `List[str]`."""
    first = stated.split(",")[0].split("[")[0].strip().lower()
    names = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
    return names.get(first, "array" if first in ("list", "tuple", "set", "union") else first or "string")


def _item(source: str, prompt: Any, label: str, **metadata: Any) -> Row:
    return {"prompt": prompt, "label": label, "metadata": {"source_name": source, **metadata}}


GSM8K = Converter(("question", "answer"), _gsm8k, "question, answer with #### (openai/gsm8k)")
MATH = Converter(("problem", "solution"), _math, "problem, solution with \\boxed (MATH, Hendrycks et al. 2021)")
VERL = Converter(("prompt", "reward_model"), _verl, "prompt, reward_model.ground_truth (DAPO-Math-17k, Search-R1)")
QA = Converter(("question", "golden_answers"), _qa, "question, golden_answers (FlashRAG sets: nq, hotpotqa, ...)")
GPQA = Converter(("Question", "Correct Answer"), _gpqa, "Question, Correct Answer, Incorrect Answer 1 to 3, shuffled")
TOOL_CALLS = Converter(("query", "tools", "answers"), _tool_calls, "query, tools, answers (xLAM function calling)")

CONVERTERS: dict[str, str] = {
    "gsm8k": "slimecli.data_tools.converters:GSM8K",
    "math": "slimecli.data_tools.converters:MATH",
    "verl": "slimecli.data_tools.converters:VERL",
    "qa": "slimecli.data_tools.converters:QA",
    "gpqa": "slimecli.data_tools.converters:GPQA",
    "tool_calls": "slimecli.data_tools.converters:TOOL_CALLS",
}
"""name -> Converter; `data.convert`"""
