"""`slime reward`: score samples, and prove a reward on its gold answers before a model trains on it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import AsOpt, JsonOpt, RecipeOpt, SetOpt, refuse_idle

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.types import Sample

EXAMPLES = [
    "slime reward --list",
    "slime reward check runs/quickstart/data/holdout.jsonl --type reasoning_gym",
    "slime reward --type math < samples.jsonl > scored.jsonl",
    "slime reward score --recipe mine.toml samples.jsonl > scored.jsonl",
    "slime reward --type math --as sft:best < samples.jsonl > sft.jsonl",
]

_CHUNK = 64
_CHECKED = 256
"""rows that a check tries unless told otherwise"""


def check_reward(recipe: Recipe, data: str, limit: int = _CHECKED) -> dict[str, Any]:
    """Score gold, empty and garbled answers of a data file, twice each.

    Args:
        data: prompt data, with optional slice.
        limit: rows tried, from the first; 0: all.

    Returns: {"ok", "rows", "problems": {kind: count}, "examples": [...], "latency_ms": {...}, "types": {name: {"rows",
    "mean_score", "latency_ms"}}}. A gold answer must get the full score, the others less, both times the same.
    """
    from slimecli.data_tools.columns import read_item
    from slimecli.data_tools.formats import placed_rows
    from slimecli.data_tools.rewards import load_reward
    from slimecli.data_tools.rewards.proof import Proof
    from slimecli.rollout.args import HookArgs
    from slimecli.weights.datasets import localise

    proof = Proof(load_reward(recipe.reward), HookArgs(recipe), recipe.reward)
    rows = islice(placed_rows(localise(data)), limit or None)
    return asyncio.run(proof.run(read_item(row, recipe.data, where) for where, row in rows))


def score_lines(recipe: Recipe, lines: Iterable[bytes], source: str = "<stdin>", *, limit: int = 0) -> Iterator[Sample]:
    """Samples from JSON lines, scored, in order. A sample whose score failed has reward None and metadata.failure.

    With reward.group, neighbours of the same group_index are scored together.

    Args:
        limit: samples read, from the first; answers to the same prompt stay together. 0: all.
    """
    from slimecli.data_tools.rewards import load_reward
    from slimecli.rollout.args import HookArgs

    reward, args = load_reward(recipe.reward), HookArgs(recipe)
    samples = _first(_read_samples(lines, source), limit)
    with asyncio.Runner() as runner:
        if recipe.reward.group:
            for _, group in groupby(samples, key=lambda s: s.group_index):
                members = list(group)
                runner.run(_score_group(reward, args, [s for s in members if _has_answer(s)]))
                yield from members
            return
        while chunk := list(islice(samples, _CHUNK)):
            runner.run(_score_chunk(reward, args, chunk))
            yield from chunk


def _read_samples(lines: Iterable[bytes], source: str) -> Iterator[Sample]:
    from slimecli.data_tools.formats import parse_line
    from slimecli.errors import DataError
    from slimecli.types import Sample, SampleStatus

    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                sample = Sample.from_dict(parse_line(line, f"{source}:{number}"))
                if sample.status is SampleStatus.PENDING and not sample.response:
                    raise ValueError("it has no response to score")
                yield sample
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{source}:{number}:1: not a sample: {error}", "feed what slime rollout wrote"
                ) from None


def _first(samples: Iterator[Sample], limit: int) -> Iterator[Sample]:
    """As many of them, and the rest of the last one's group: a rule or a scorer looks at whole groups."""
    prompt = None
    for place, sample in enumerate(samples):
        if limit and place >= limit and _prompt_of(place, sample) != prompt:
            return
        prompt = _prompt_of(place, sample)
        yield sample


async def _score_chunk(reward: Any, args: Any, chunk: list[Sample]) -> None:
    from slimecli.errors import SlimeError

    async def one(sample: Sample) -> None:
        try:
            _set(sample, await reward(args, sample))
        except SlimeError as error:
            _set(sample, error)

    await asyncio.gather(*(one(s) for s in chunk if _has_answer(s)))


def _has_answer(sample: Sample) -> bool:
    """False for one that failed before it came to a score; it stays as it is."""
    return str(sample.metadata.get("failure", "reward:")).startswith("reward:")


async def _score_group(reward: Any, args: Any, group: list[Sample]) -> None:
    from slimecli.errors import SlimeError

    if not group:
        return
    try:
        scores = await reward(args, group)
    except SlimeError as error:
        scores = [error] * len(group)
    for sample, score in zip(group, scores, strict=True):
        _set(sample, score)


def _set(sample: Sample, score: Any) -> None:
    """The score; instead of one that failed the reason, and no reward."""
    from slimecli.errors import SlimeError

    sample.metadata = {k: v for k, v in sample.metadata.items() if k != "failure"}
    if isinstance(score, SlimeError):
        sample.reward = None
        sample.metadata["failure"] = f"reward: {type(score).__name__}: {score.what}"
    else:
        sample.reward = score


def cli(
    action: Annotated[
        str, typer.Argument(metavar="[check|score]", help="prove a reward, or score samples (default: those on stdin)")
    ] = "",
    data: Annotated[str, typer.Argument(metavar="[DATA]", help="prompt data for check; samples for score")] = "",
    type_: Annotated[str, typer.Option("--type", metavar="NAME|FILE:FN", help="scorer; default: the recipe's")] = "",
    recipe: RecipeOpt = "",
    set_: SetOpt = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, metavar="N", help="rows that check tries (256), samples to score (all); 0: all"),
    ] = None,
    as_: AsOpt = "samples",
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
        refuse_idle(
            {"--as": as_ != "samples"}, "on check, which writes no samples", "slime reward --as ... < samples.jsonl"
        )
        return _check(load_recipe(recipe, overrides), data, _CHECKED if limit is None else limit, json_)
    if action == "score" or (not action and not sys.stdin.isatty()):
        return _score(load_recipe(recipe, overrides), data, as_, limit or 0, said=bool(action))
    raise UsageError(
        "say what to do" if action != "check" else "check needs a data file",
        "slime reward --list | slime reward check DATA | slime reward < samples.jsonl",
    )


def _check(recipe: Recipe, data: str, limit: int, json_: bool) -> None:
    from slimecli import console
    from slimecli.errors import DataError

    result = check_reward(recipe, data, limit)
    if json_:
        console.emit(result)
    else:
        table = [_row(name, found) for name, found in result["types"].items()]
        console.table(table, ["type", "rows", "gold", "empty", "garbled", "p50 ms", "p90 ms", "p99 ms", "max ms"])
    if not result["ok"]:
        lines = "\n".join(f"  - {e}" for e in result["examples"])
        raise DataError(f"the reward is not right: {result['problems']}\n{lines}", "mend the reward or the labels")
    console.say(
        f"{result['rows']} rows: gold answers get the full score, empty and garbled ones less, and scores repeat"
    )


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    means = {kind: f"{mean:.3f}" for kind, mean in found["mean_score"].items()}
    times = {f"{at} ms": f"{value:g}" for at, value in found["latency_ms"].items()}
    return {"type": name, "rows": found["rows"], "gold": "", "empty": "", "garbled": ""} | means | times


def _score(recipe: Recipe, data: str, selection: str, limit: int, *, said: bool) -> None:
    from collections import Counter
    from pathlib import Path

    from slimecli import console
    from slimecli.data_tools.selection import parse_selection
    from slimecli.errors import DataError, PartialError, UsageError

    chosen, left = parse_selection(selection), Counter[str]()
    data = "" if data == "-" else data
    if data and not Path(data).is_file():
        raise UsageError(f"no file {data}", "slime reward score samples.jsonl, or feed them on stdin")
    with Path(data).open("rb") if data else sys.stdin.buffer as stream:
        total = failed = written = 0
        scored = score_lines(recipe, stream, data or "<stdin>", limit=limit)
        for _, group in groupby(enumerate(scored), key=lambda pair: _prompt_of(*pair)):
            members = [sample for _, sample in group]
            total += len(members)
            failed += sum("failure" in s.metadata and s.reward is None for s in members)
            for sample in chosen.pick(members, recipe.reward.key or None, left):
                console.emit_line(chosen.line(sample, recipe.data.tool_key))
                written += 1
    if not total and not said:
        raise UsageError("say what to do: nothing came in on stdin", "slime reward --help")
    if not total:
        raise DataError(f"{data or '<stdin>'} has no samples", "feed what slime rollout wrote")
    console.note(f"{total} samples scored, {failed} failed")
    if written < total:
        why = ", ".join(f"{n} {reason}" for reason, n in sorted(left.items()) if n)
        console.note(f"{written} written; left out: {why}")
    if failed:
        raise PartialError(f"{failed} of {total} samples could not be scored", "see metadata.failure of the samples")


def _prompt_of(place: int, sample: Sample) -> tuple[bool, int]:
    """Equal for neighbours that answer the same prompt; a sample that does not say which one stands alone."""
    return (True, sample.group_index) if sample.group_index is not None else (False, place)


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
