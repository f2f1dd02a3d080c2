"""Errors that say what is wrong and how to mend it, and the exit codes of the command line.

Every expected failure is a SlimeError. Only `cli.main` prints them; a traceback appears under --debug alone.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees. Doing nothing, or less than planned, is never OK."""

    OK = 0
    FAILED = 1
    """the work was tried and failed"""
    USAGE = 2
    """wrong command line or recipe: nothing was started"""
    MISSING_STAGE = 3
    """an earlier stage has not been done"""
    BAD_DATA = 4
    """an input file or sample is not what it must be"""
    GATE = 5
    """a gate of the recipe stopped the run"""
    PARTIAL = 6
    """less was done than planned; what was done is kept"""
    INTERRUPTED = 130


class SlimeError(Exception):
    """An expected failure.

    Args:
        what: one sentence: what is wrong, with the offending value and where it stands.
        fix: one sentence: what to type or change.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class UsageError(SlimeError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class RecipeError(SlimeError):
    """The recipe is wrong; carries every problem found, not the first one.

    Attributes:
        rest: the recipe without its wrong entries, where they can be left out; for checks that go on from there.
    """

    exit_code = ExitCode.USAGE
    rest: object = None

    def __init__(self, problems: list[str], source: str = "recipe") -> None:
        lines = "\n".join(f"  - {p}" for p in problems)
        super().__init__(f"{len(problems)} problem(s) in {source}:\n{lines}", "correct them all, then run `slime plan`")
        self.problems = problems
        self.source = source

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems, self.source))


class MissingStageError(SlimeError):
    """A stage that this one builds on has not been done."""

    exit_code = ExitCode.MISSING_STAGE


class DataError(SlimeError):
    """An input file, row or sample is not what it must be."""

    exit_code = ExitCode.BAD_DATA


class GateError(SlimeError):
    """A gate of the recipe said stop."""

    exit_code = ExitCode.GATE


class PartialError(SlimeError):
    """Less was done than planned."""

    exit_code = ExitCode.PARTIAL


class InterruptedRunError(SlimeError):
    """The user stopped the run (Ctrl-C or SIGTERM)."""

    exit_code = ExitCode.INTERRUPTED


def nearest(name: str, known: list[str]) -> str:
    """` (did you mean 'x'?)` for the closest known name, or an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
