"""`slime reward`: score samples, and prove a reward on its gold answers before a model trains on it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, RecipeOpt, SetOpt

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.types import Sample

EXAMPLES = [
    "slime reward --list",
    "slime reward check runs/quickstart/data/holdout.jsonl --type reasoning_gym",
    "slime reward score --type math < samples.jsonl > scored.jsonl",
]

_CHUNK = 64


def check_reward(recipe: Recipe, data: str, limit: int = 256) -> dict[str, Any]:
    """Score gold, empty and garbled answers of a data file.

    Args:
        data: prompt data, with optional slice.
        limit: rows tried, from the first; 0: all.

    Returns: {"ok", "rows", "problems": {kind: count}, "examples": [...], "latency_ms": {...}}. A gold answer must
    score 1, the others less, and the same answer must score the same twice.
    """
    from slimecli.data_tools.columns import read_item
    from slimecli.data_tools.formats import read_rows

    probes = []
    for number, row in enumerate(islice(read_rows(data), limit or None), 1):
        item = read_item(row, recipe.data, f"{data} row {number}")
        probes.append((number, item))
    trials = [t for number, item in probes for t in _trials(number, item, recipe)]
    return asyncio.run(_run_trials(recipe, trials)) | {"rows": len(probes)}


def _trials(number: int, item: Any, recipe: Recipe) -> Iterator[tuple[str, int, Sample]]:
    from slimecli.types import Sample

    def sample(text: str) -> Sample:
        return Sample(index=number, response=text, label=item.label, metadata=item.metadata)

    gold = _gold(item, recipe)
    if gold is not None:
        yield "gold", number, sample(gold)
        yield "again", number, sample(gold)
        yield "garbled", number, sample(_wrap(f"{_plain(item)}7~", item, recipe))
    yield "empty", number, sample("")


def _kind(item: Any, recipe: Recipe) -> str:
    return "" if recipe.reward.path else str(item.metadata.get("rm_type") or recipe.reward.type)


def _plain(item: Any) -> str:
    return str(item.metadata.get("gold", item.label))


def _gold(item: Any, recipe: Recipe) -> str | None:
    """What a perfect response looks like; None when the row does not tell (the label of a regex is a pattern)."""
    if "gold" in item.metadata:
        return str(item.metadata["gold"])
    if item.label is None or _kind(item, recipe).endswith("regex"):
        return None
    return _wrap(item.label, item, recipe)


def _wrap(answer: str, item: Any, recipe: Recipe) -> str:
    """The answer where the scorer looks for it."""
    kind, place = _kind(item, recipe), item.metadata.get("extract", "")
    if kind.startswith("boxed_") or place == "boxed" or (kind == "math" and not place):
        return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return f"<answer>{answer}</answer>" if place == "answer_tag" else answer


async def _run_trials(recipe: Recipe, trials: list[tuple[str, int, Sample]]) -> dict[str, Any]:
    from slimecli.data_tools.rewards import load_reward
    from slimecli.errors import SlimeError
    from slimecli.rollout.args import HookArgs

    reward, args = load_reward(recipe.reward), HookArgs(recipe)
    scores: dict[tuple[str, int], float] = {}
    problems: dict[str, int] = {}
    examples: list[str] = []
    seconds: list[float] = []

    def problem(kind: str, text: str) -> None:
        problems[kind] = problems.get(kind, 0) + 1
        if problems[kind] <= 3:
            examples.append(f"{kind}: {text}")

    for kind, number, sample in trials:
        start = time.perf_counter()
        try:
            result = (await reward(args, [sample]))[0] if recipe.reward.group else await reward(args, sample)
            sample.reward = result
            score = sample.get_reward_value(recipe.reward.key or None)
        except SlimeError as error:
            problem("raised", f"row {number}: {error.what}")
            continue
        seconds.append(time.perf_counter() - start)
        scores[kind, number] = score
        shown = f"row {number}: {sample.response!r} scored {score:g}"
        if kind == "gold" and score < 1:
            problem("gold answer below 1", shown)
        if kind in ("empty", "garbled") and score >= 1:
            problem(f"{kind} answer scored 1", shown)
        if kind == "again" and score != scores.get(("gold", number), score):
            problem("not deterministic", shown)
    if not any(kind == "gold" for kind, _, _ in trials):
        problem("no gold answer", "no row has a label or metadata.gold that could be scored")
    return {"ok": not problems, "problems": problems, "examples": examples, "latency_ms": _latency(seconds)}


def _latency(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for name, q in at.items()}


def score_lines(recipe: Recipe, lines: Iterable[bytes], source: str = "<stdin>") -> Iterator[Sample]:
    """Samples from JSON lines, scored, in order. A sample whose score failed has reward None and metadata.failure."""
    from slimecli.data_tools.rewards import load_reward
    from slimecli.rollout.args import HookArgs

    reward, args = load_reward(recipe.reward), HookArgs(recipe)
    samples = _read_samples(lines, source)
    with asyncio.Runner() as runner:
        while chunk := list(islice(samples, _CHUNK)):
            runner.run(_score_chunk(reward, args, chunk))
            yield from chunk


def _read_samples(lines: Iterable[bytes], source: str) -> Iterator[Sample]:
    from slimecli.data_tools.formats import parse_line
    from slimecli.errors import DataError
    from slimecli.types import Sample

    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Sample.from_dict(parse_line(line, f"{source}:{number}"))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{source}:{number}:1: not a sample: {error}", "feed what slime rollout wrote"
                ) from None


async def _score_chunk(reward: Any, args: Any, chunk: list[Sample]) -> None:
    from slimecli.errors import SlimeError

    async def one(sample: Sample) -> None:
        try:
            sample.reward = await reward(args, sample)
        except SlimeError as error:
            sample.reward = None
            sample.metadata = {**sample.metadata, "failure": f"reward: {type(error).__name__}: {error.what}"}

    await asyncio.gather(*(one(s) for s in chunk))


def cli(
    action: Annotated[str, typer.Argument(metavar="[check|score]", help="prove a reward, or score samples")] = "",
    data: Annotated[str, typer.Argument(metavar="[DATA]", help="prompt data for check; samples for score")] = "",
    type_: Annotated[str, typer.Option("--type", metavar="NAME|FILE:FN", help="scorer; default: the recipe's")] = "",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="rows that check tries; 0: all")] = 256,
    list_: Annotated[bool, typer.Option("--list", help="built-in scorers")] = False,
    json_: JsonOpt = False,
) -> None:
    """Score samples with a reward function, or check it on gold answers."""
    from slimecli.errors import UsageError
    from slimecli.recipe import load_recipe

    if list_:
        return _list(json_)
    which = "path" if ":" in type_ or "." in type_ else "type"
    overrides = (*(set_ or ()), *([f"reward.{which}={json.dumps(type_)}"] if type_ else []))
    if action == "check" and data:
        return _check(load_recipe(recipe, overrides), data, limit, json_)
    if action == "score":
        return _score(load_recipe(recipe, overrides), data)
    raise UsageError(
        "say what to do" if action != "check" else "check needs a data file",
        "slime reward --list | slime reward check DATA | slime reward score < samples.jsonl",
    )


def _check(recipe: Recipe, data: str, limit: int, json_: bool) -> None:
    from slimecli import console
    from slimecli.errors import DataError

    result = check_reward(recipe, data, limit)
    latency = ", ".join(f"{k} {v:g} ms" for k, v in result["latency_ms"].items())
    console.say(f"{result['rows']} rows; {latency}")
    if json_:
        console.emit(result)
    if not result["ok"]:
        lines = "\n".join(f"  - {e}" for e in result["examples"])
        raise DataError(f"the reward is not right: {result['problems']}\n{lines}", "mend the reward or the labels")
    console.say("gold answers score 1, empty and garbled ones do not, and scores repeat")


def _score(recipe: Recipe, data: str) -> None:
    from pathlib import Path

    from slimecli import console
    from slimecli.errors import PartialError, UsageError

    if data and not Path(data).is_file():
        raise UsageError(f"no file {data}", "slime reward score samples.jsonl, or feed them on stdin")
    with Path(data).open("rb") if data else sys.stdin.buffer as stream:
        total = failed = 0
        for sample in score_lines(recipe, stream, data or "<stdin>"):
            total += 1
            failed += "failure" in sample.metadata and sample.reward is None
            console.emit_line(sample.to_json())
    console.note(f"{total} samples scored, {failed} failed")
    if failed:
        raise PartialError(f"{failed} of {total} samples could not be scored", "see metadata.failure of the samples")


def _list(json_: bool) -> None:
    import inspect

    from slimecli import console
    from slimecli.data_tools.rewards import REWARDS
    from slimecli.lookup import look_up

    rows = []
    for name in REWARDS:
        text = inspect.getdoc(look_up(REWARDS, name, "reward type")) or ""
        rows.append({"name": name, "what": text.partition("\n")[0]})
    if json_:
        console.emit(rows)
    else:
        console.table(rows, ["name", "what"])
