"""Scoring a program by running it on tests, in the sandbox.

A row's metadata.tests (or its label, as JSON) is a list of these, or {"inputs": [...], "outputs": [...], "fn_name"?}:

    {"input": "1 2\\n", "output": "3\\n"}      the program reads stdin; its stdout is compared here, line by line
    {"call": "add(1, 2)", "expected": 3}      the value comes out as JSON and is compared here
    "assert add(1, 2) == 3"                   runs beside the program: nothing raised is a pass

The first two are judged outside the sandbox, where a program that cheats cannot reach. A program that leaves early, or
says that all is well, passes no test. An object of the program's own class never equals plain data in an assert; a
program that attacks the interpreter it shares with an assert may still win.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from typing import Any

from slimecli.data_tools.rewards.threads import in_thread
from slimecli.data_tools.sandbox import LEAST, PARTS, Limits, Outcome, run_python
from slimecli.errors import DataError, SlimeError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample

_FENCE = re.compile(r"```([\w+-]*)[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


class CodeReward:
    """1.0 when the program in the response passes all metadata.tests; with metadata.partial the share of them."""

    parallel = max(1, min(8, os.cpu_count() or 1))
    """programs run at the same time"""

    def __init__(self, section: RewardSection) -> None:
        self._section = section
        code = section.code
        self._limits = Limits(wall_s=code.wall_s, cpu_s=code.wall_s, memory_mb=code.memory_mb, processes=code.processes)
        self._required = {"required": PARTS, "best": LEAST, "limits": ()}[code.isolation]

    async def __call__(self, args: Any, sample: Sample) -> float:
        """The score of one sample."""
        until = time.monotonic() + self._section.timeout_s
        return float(await in_thread(lambda: self._score(sample, until)))

    def _score(self, sample: Sample, until: float) -> float:
        tests = read_tests(sample.metadata.get("tests") or sample.label)
        program = extract_code(sample.response)
        if not program:
            return 0.0
        keep_on = bool(sample.metadata.get("partial"))
        passed = 0
        checks = [t for t in tests if "kind" in t]
        if checks:
            outcome = self._run(program, until, checks=[_asked(c) for c in checks], all_checks=keep_on)
            passed += _count(checks, outcome)
        for test in (t for t in tests if "kind" not in t):
            if passed < len(checks) and not keep_on:
                break
            outcome = self._run(program, until, stdin=test["input"])
            right = outcome.status == "ok" and same_output(outcome.stdout, test["output"])
            passed += right
            if not right and not keep_on:
                break
        return passed / len(tests) if keep_on else float(passed == len(tests))

    def _run(self, program: str, until: float, **what: Any) -> Outcome:
        if time.monotonic() > until:
            raise SlimeError(
                "its tests together took longer than reward.timeout_s", "fewer tests, or a longer deadline"
            )
        return run_python(program, limits=self._limits, required=self._required, **what)


def extract_code(response: str) -> str:
    """The last fenced block (one marked python before others), after any thinking; without a fence the whole text."""
    said = response.rpartition("</think>")[2]
    blocks = _FENCE.findall(said)
    if not blocks:
        return said.strip()
    python = [body for mark, body in blocks if mark.lower() in ("python", "py", "python3")]
    return str((python or [body for _, body in blocks])[-1])


def read_tests(stored: Any) -> list[dict[str, Any]]:
    """Tests in one shape: {"input", "output"}, {"kind": "call", "code", "expected"} or {"kind": "assert", "code"}."""
    try:
        data = json.loads(stored) if isinstance(stored, str) else stored
        if isinstance(data, dict) and "inputs" in data:
            data = _paired(data)
        tests = [_one(t) for t in data]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"the row's tests cannot be read: {type(error).__name__}: {error}",
            'metadata.tests is a list of {"input", "output"}, {"call", "expected"} or "assert ..."',
        ) from None
    if not tests:
        raise DataError("reward code needs metadata.tests and the row has none", "give each row its tests")
    return tests


def _paired(data: dict[str, Any]) -> list[Any]:
    name = data.get("fn_name")
    pairs = zip(data["inputs"], data["outputs"], strict=True)
    if not name:
        return [{"input": i, "output": o} for i, o in pairs]
    return [
        {"call": f"{name}({', '.join(map(repr, i))})", "expected": o[0] if isinstance(o, list) and len(o) == 1 else o}
        for i, o in pairs
    ]


def _one(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        return {"kind": "assert", "code": test}
    if "call" in test:
        return {"kind": "call", "code": str(test["call"]), "expected": test["expected"]}
    source, target = (test[k] if k in test else test[other] for k, other in (("input", "stdin"), ("output", "stdout")))
    return {"input": _text(source), "output": _text(target)}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _asked(check: dict[str, Any]) -> dict[str, str]:
    """What goes into the sandbox: never the expected value."""
    return {"kind": check["kind"], "code": check["code"]}


def _count(checks: list[dict[str, Any]], outcome: Outcome) -> int:
    if outcome.results is None or outcome.status != "ok":
        return 0
    passed = 0
    for check, (ran, value) in zip(checks, outcome.results, strict=False):
        passed += ran and (check["kind"] == "assert" or same_value(value, check["expected"]))
    return passed


def same_value(given: Any, wanted: Any) -> bool:
    """Equality of JSON values; floats within 1e-6, a tuple is a list, true is not 1."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, (int, float)) and isinstance(wanted, (int, float)):
        exact = isinstance(given, int) and isinstance(wanted, int)
        return given == wanted if exact else math.isclose(given, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(given, list) and isinstance(wanted, (list, tuple)):
        return len(given) == len(wanted) and all(same_value(a, b) for a, b in zip(given, wanted, strict=True))
    if isinstance(given, dict) and isinstance(wanted, dict):
        other = {str(k): v for k, v in wanted.items()}
        return given.keys() == other.keys() and all(same_value(v, other[k]) for k, v in given.items())
    return bool(given == wanted)


def same_output(given: str, wanted: str) -> bool:
    """Equal line by line, white space at their ends and empty last lines aside."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (given, wanted))
    return ours == theirs
