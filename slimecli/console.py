"""Talking to people and to programs: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimecli import env

if TYPE_CHECKING:
    from rich.console import Console

FOLDED = 16
"""characters to which a column of a drawn table may be folded; a terminal with less room gets one value a line"""

_console: Console | None = None


def talk() -> Console:
    """The rich console on stderr; rich is imported on first use."""
    global _console
    if _console is None or _console.file is not sys.stderr:
        from rich.console import Console

        _console = Console(file=sys.stderr, highlight=False, no_color=env.no_color() or None, soft_wrap=True)
    return _console


def is_interactive() -> bool:
    """True when a person watches stderr, so live displays make sense."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """One plain line to the person; markup is not interpreted."""
    talk().print(text, markup=False)


def note(text: str) -> None:
    """A dimmed line: reasons, paths, what was skipped."""
    talk().print(text, markup=False, style="dim")


def warn(text: str) -> None:
    """Something the person should act on, though the work goes on."""
    talk().print(f"warning: {text}", markup=False, style="yellow")


def hint(command: str, why: str = "") -> None:
    """What to type next."""
    talk().print(f"  {command}" + (f"    # {why}" if why else ""), markup=False, style="cyan")


def fail(text: str) -> None:
    """An error; only the command line's error boundary calls this."""
    talk().print(f"error: {text}", markup=False, style="red")


def emit(data: Any) -> None:
    """Data for programs: one JSON document on stdout."""
    sys.stdout.write(json.dumps(data, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def emit_line(text: str) -> None:
    """Data for programs: one line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str = "") -> None:
    """A table on stdout: drawn for a terminal, tab-separated with a header for a pipe."""
    if not sys.stdout.isatty():
        emit_line("\t".join(columns))
        for row in rows:
            emit_line("\t".join(str(row.get(c, "")) for c in columns))
        return
    from rich.console import Console
    from rich.table import Table

    screen = Console(no_color=env.no_color() or None)
    widest = {c: max([len(c), *(len(str(row.get(c, ""))) for row in rows)]) for c in columns}
    if sum(min(w, FOLDED) + 3 for w in widest.values()) + 1 > screen.width:
        _records(screen, rows, columns)
        return
    drawn = Table(title=title or None, title_justify="left")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(str(row.get(c, "")) for c in columns))
    screen.print(drawn)


def _records(screen: Console, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """One block of lines per row, for a terminal too narrow for a table."""
    label = max(len(c) for c in columns)
    for row in rows:
        for column in columns:
            if str(row.get(column, "")):
                screen.print(f"{column:<{label}}  {row[column]}", markup=False, highlight=False, soft_wrap=True)
        screen.print()
