"""Proving a reward on its gold answers before a model trains on it.

Of every row three answers are scored, twice each: the gold one, an empty one and a garbled one. A gold answer must get
the full score, the others less, and the second run must agree with the first. Scorers without a full score (judges,
servers, tournaments) must put the gold answer above the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slimecli.data_tools.columns import Item
from slimecli.data_tools.rewards import Reward
from slimecli.data_tools.rewards.extract import extract_boxed
from slimecli.errors import SlimeError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample

RELATIVE = ("judge", "remote_rm", "tournament")
"""scorers without a score that a gold answer must reach"""
_ONLY_STATED = ("regex", "ifbench", "code")
"""scorers whose label is no answer: only metadata.gold says what a perfect response is"""
_UNGARBLED = ("ifbench",)
"""a garbled answer may well follow its instructions"""
_EXAMPLES = 3
_TOLERANCE = 1e-9


@dataclass
class _Tally:
    """What was seen of one reward type."""

    rows: set[int] = field(default_factory=set)
    scores: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


class Proof:
    """Trials of one reward and what came of them."""

    def __init__(self, reward: Reward, args: Any, section: RewardSection) -> None:
        self._reward = reward
        self._args = args
        self._section = section
        self._problems: Counter[str] = Counter()
        self._examples: list[str] = []
        self._tallies: dict[str, _Tally] = {}

    async def run(self, items: Iterable[Item]) -> dict[str, Any]:
        """{"ok", "rows", "problems": {kind: count}, "examples", "latency_ms", "types": {type: {...}}}."""
        rows = golds = 0
        for rows, item in enumerate(items, 1):
            golds += await self._row(rows, item)
        if not golds:
            self._problem("no gold answer", "no row has a label or metadata.gold that could be scored")
        seconds = [s for tally in self._tallies.values() for s in tally.seconds]
        return {
            "ok": not self._problems,
            "rows": rows,
            "problems": dict(self._problems),
            "examples": self._examples,
            "latency_ms": latency(seconds),
            "types": {name: _summary(tally) for name, tally in sorted(self._tallies.items())},
        }

    async def _row(self, number: int, item: Item) -> bool:
        """Score one row's answers; True when it has a gold one."""
        kind = kind_of(item, self._section)
        answers = dict(answers_of(item, self._section))
        tally = self._tallies.setdefault(kind, _Tally())
        tally.rows.add(number)
        runs = [await self._scores(number, item, answers, tally) for _ in range(2)]
        for scores in runs:
            if isinstance(scores, SlimeError):
                self._problem("raised", f"row {number}: {scores.what}")
                return "gold" in answers
        first, second = runs
        assert isinstance(first, dict) and isinstance(second, dict)
        for name, score in first.items():
            tally.scores.setdefault(name, []).append(score)
            if second[name] != score:
                self._problem(
                    "not deterministic", f"row {number}: {answers[name]!r} scored {score:g}, then {second[name]:g}"
                )
        self._judge(number, kind, answers, first)
        return "gold" in answers

    async def _scores(
        self, number: int, item: Item, answers: dict[str, str], tally: _Tally
    ) -> dict[str, float] | SlimeError:
        samples = {
            name: Sample(
                index=number, prompt=item.prompt or "", response=text, label=item.label, metadata=dict(item.metadata)
            )
            for name, text in answers.items()
        }
        results: dict[str, Any] = {}
        try:
            if self._reward.group and kind_of(item, self._section) in ("tournament", "mix"):
                start = time.perf_counter()
                results = dict(zip(samples, await self._reward(self._args, list(samples.values())), strict=True))
                tally.seconds.append(time.perf_counter() - start)
            else:
                for name, sample in samples.items():
                    start = time.perf_counter()
                    result = await self._reward(self._args, [sample] if self._reward.group else sample)
                    results[name] = result[0] if self._reward.group else result
                    tally.seconds.append(time.perf_counter() - start)
            for name, sample in samples.items():
                sample.reward = results[name]
            return {name: s.get_reward_value(self._section.key or None) for name, s in samples.items()}
        except SlimeError as error:
            return error

    def _judge(self, number: int, kind: str, answers: dict[str, str], scores: dict[str, float]) -> None:
        def shown(name: str) -> str:
            return f"row {number}: {answers[name]!r} scored {scores[name]:g}"

        others = [name for name in scores if name != "gold"]
        if self._is_relative(kind):
            for name in others:
                if "gold" in scores and scores[name] >= scores["gold"]:
                    self._problem(f"{name} answer not below the gold one", f"{shown(name)}, gold {scores['gold']:g}")
            return
        full = self._full(kind)
        if "gold" in scores and scores["gold"] < full - _TOLERANCE:
            self._problem(f"gold answer below {full:g}", shown("gold"))
        for name in others:
            if scores[name] >= full - _TOLERANCE:
                self._problem(f"{name} answer scored {full:g}", shown(name))

    def _is_relative(self, kind: str) -> bool:
        parts = list(self._section.mix) if kind == "mix" else [kind]
        return any(part.removeprefix("boxed_") in RELATIVE for part in parts)

    def _full(self, kind: str) -> float:
        """The score of a perfect answer."""
        if kind != "mix" or self._section.key not in ("", "score"):
            return 1.0
        return sum(weight for weight in self._section.mix.values() if weight > 0)

    def _problem(self, kind: str, text: str) -> None:
        self._problems[kind] += 1
        if self._problems[kind] <= _EXAMPLES:
            self._examples.append(f"{kind}: {text}")


def kind_of(item: Item, section: RewardSection) -> str:
    """The scorer of a row: its own, the recipe's, or `own` for a function by path."""
    return "own" if section.path else str(item.metadata.get("rm_type") or section.type)


def answers_of(item: Item, section: RewardSection) -> Iterator[tuple[str, str]]:
    """(gold, empty or garbled, response) of a row. There is no gold one when the row does not tell."""
    kind = kind_of(item, section)
    parts = [p for p in section.mix if ":" not in p] if kind == "mix" else [kind]
    bases = [part.removeprefix("boxed_") for part in parts]
    if "gold" in item.metadata:
        gold = str(item.metadata["gold"])
    elif item.label is None or any(base in _ONLY_STATED for base in bases):
        yield "empty", ""
        return
    else:
        gold = _written(item.label, item, parts)
    yield "gold", gold
    yield "empty", ""
    if any(base in _UNGARBLED for base in bases):
        return
    stated = item.label is None or any(base in _ONLY_STATED for base in bases)
    plain = gold if stated else extract_boxed(str(item.label)) or str(item.label)
    if "code" in bases:
        yield "garbled", f"```python\n{plain}\n)(\n```"
    elif "format" in bases and len(bases) == 1:
        yield "garbled", f"{plain}7~"
    else:
        yield "garbled", _written(_other(plain, bases), item, parts)


def _other(answer: str, bases: list[str]) -> str:
    """A wrong answer of the same kind."""
    if "gpqa" in bases and len(answer.strip()) == 1 and answer.strip().isalnum():
        return {"A": "B", "a": "b", "0": "1"}.get(answer.strip(), "A" if answer.strip().isalpha() else "0")
    if "math_verify" in bases:  # reads past what it does not know
        return f"{answer}+1"
    return f"{answer}8" if "dapo" in bases else f"{answer}7~"


def _written(answer: str, item: Item, parts: list[str]) -> str:
    """The answer where the scorers look for it."""
    place = item.metadata.get("extract", "")
    boxed = place == "boxed" or any(p.startswith("boxed_") for p in parts)
    boxed = boxed or (not place and any(p in ("math", "math_verify", "format") for p in parts)) or "deepscaler" in parts
    text = f"\\boxed{{{answer}}}" if boxed and "\\boxed" not in answer else answer
    if place == "answer_tag":
        text = f"<answer>{answer}</answer>"
    if "deepscaler" in parts:
        text = f"<think></think>\n{text}"
    if "dapo" in parts:
        return f"{text}\nAnswer: {answer}" if boxed else f"Answer: {answer}"
    return f"The answer is {_letter(answer)}" if "gpqa" in parts else text


def _letter(answer: str) -> str:
    """gpqa's labels may be numbers of choices."""
    return "ABCDEFGHIJ"[int(answer)] if answer.isdigit() and int(answer) < 10 else answer


def latency(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for name, q in at.items()}


def _summary(tally: _Tally) -> dict[str, Any]:
    means = {name: sum(values) / len(values) for name, values in tally.scores.items()}
    return {"rows": len(tally.rows), "mean_score": means, "latency_ms": latency(tally.seconds)}
