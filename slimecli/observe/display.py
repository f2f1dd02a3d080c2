"""What a person sees while a run works: a live stage list and step table on a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slimecli import console
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import Group as RichGroup
    from rich.live import Live
    from rich.table import Table

Metrics = Mapping[str, Any]

ROWS_SHOWN = 12
"""steps in the live table: a screen of 24 lines holds them beside the stage list"""
ETA_WINDOW = 20
"""steps whose mean duration predicts the rest; long enough to even out evaluation steps"""

_MARKS = {
    "waiting": "·",
    "running": "▶",
    "done": "✓",
    "unchanged": "=",
    "skipped": "-",
    "failed": "✗",
    "interrupted": "‖",
}
_STYLES = {"running": "bold cyan", "done": "green", "failed": "bold red", "waiting": "dim", "unchanged": "dim"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the step table: the first of `keys` that a record has is shown."""

    title: str
    keys: tuple[str, ...]
    format: str


COLUMNS: tuple[Column, ...] = (
    Column(title="loss", keys=("train/loss",), format=".4f"),
    Column(title="reward", keys=("rollout/reward",), format=".3f"),
    Column(title="accuracy", keys=("rollout/accuracy",), format=".1%"),
    Column(title="held-out", keys=("eval/holdout/sampled", "eval/holdout/greedy"), format=".1%"),
    Column(title="KL", keys=("train/kl", "train/ppo_kl"), format=".1e"),
    Column(title="entropy", keys=("train/entropy",), format=".3f"),
    Column(title="length", keys=("rollout/response_length",), format=".1f"),
    Column(title="gap", keys=("train/logprob_gap",), format=".0e"),
    Column(title="tokens/s", keys=("tokens_per_s",), format=",.0f"),
    Column(title="seconds", keys=("seconds/step",), format=".2f"),
)
"""the step table, left to right; a column without any value in sight is left out"""


@dataclass(kw_only=True)
class StageLine:
    """One line of the stage list."""

    status: str = "waiting"
    detail: str = ""
    started: float = 0.0
    seconds: float | None = None
    """duration, once it has ended"""

    def elapsed(self, now: float) -> float | None:
        """Seconds so far, or None before the start."""
        if self.seconds is not None:
            return self.seconds
        return now - self.started if self.status == "running" else None


@dataclass(kw_only=True)
class StepClock:
    """Remaining time from the latest steps."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_WINDOW))

    def add(self, seconds: float) -> None:
        """One more step took this long."""
        if math.isfinite(seconds) and seconds >= 0:
            self.seconds.append(seconds)

    def remaining(self, steps: int) -> float | None:
        """Seconds for `steps` further steps; None while nothing is known."""
        return steps * sum(self.seconds) / len(self.seconds) if self.seconds else None


class Progress:
    """Progress of one run. Everything goes to stderr, so that stdout stays data.

    Args:
        run: the run; its name and the recipe's title stand above everything.
        recipe: the recipe in force.
        stages: names shown from the start as waiting, in order; further ones appear when they begin.
        live: draw in place; None: when stderr is a terminal.
    """

    def __init__(self, run: RunDir, recipe: Recipe, stages: Sequence[str] = (), *, live: bool | None = None) -> None:
        self._title = f"run {run.root}" + (f": {recipe.title}" if recipe.title else "")
        self._stages: dict[str, StageLine] = {name: StageLine() for name in stages}
        self._rows: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=ROWS_SHOWN)
        self._clock = StepClock()
        self._is_live = console.is_interactive() if live is None else live
        self._live: Live | None = None
        self._closed = False
        if not self._is_live:
            console.say(self._title)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def stage(self, name: str, status: str, detail: str = "") -> None:
        """A stage changed: status is waiting, running, done, unchanged, skipped or failed."""
        line = self._stages.setdefault(name, StageLine())
        now = time.monotonic()
        if status == "running" and line.status != "running":
            line.started, line.seconds = now, None
            self._rows.clear()
            self._clock = StepClock()
        elif line.status == "running" and status != "running":
            line.seconds = now - line.started
        line.status, line.detail = status, detail
        if self._is_live:
            self._start_drawing()
            if self._live is not None:
                self._live.refresh()
        else:
            console.say(stage_text(name, line, now))

    def step(self, step: int, total: int, metrics: Metrics, perf: Metrics, *, stage: str = "") -> None:
        """Step `step` of `total` of a stage is done, with its two records. One without metrics is no news."""
        if not metrics:
            return
        record = {**metrics, **perf}
        self._rows.append((step, total, record))
        if step > 0:  # step 0 is the start: loading and the first evaluation, which later steps do not repeat
            self._clock.add(float(record.get("seconds/step", math.nan)))
        if self._is_live:
            # drawn by the display's own clock: a redraw per step would cost more than a small model's step
            self._start_drawing()
        else:
            text = step_text(step, total, record, self._clock.remaining(total - step))
            console.say(f"{stage} {text}" if stage else text)

    def message(self, text: str) -> None:
        """A line that stays above the live display."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            console.say(text)

    def close(self) -> None:
        """Leave the last state on the screen and stop drawing. Idempotent."""
        self._closed = True
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start_drawing(self) -> None:
        if self._live is None and not self._closed:
            from rich.live import Live

            # stdout is left alone: it carries data, which must not pass through the drawing console
            self._live = Live(
                console=console.talk(),
                get_renderable=self.render,
                refresh_per_second=2,
                redirect_stdout=False,
                vertical_overflow="crop",
            )
            self._live.start()

    def render(self) -> RichGroup:
        """The whole live display."""
        from rich.console import Group as RichGroup
        from rich.text import Text

        now = time.monotonic()
        width = max((len(n) for n in self._stages), default=0)
        parts: list[Any] = [Text(self._title, style="bold", no_wrap=True)]
        parts += [
            Text(stage_text(f"{name:<{width}}", line, now), style=_STYLES.get(line.status, ""), no_wrap=True)
            for name, line in self._stages.items()
        ]
        if self._rows:
            step, total, _ = self._rows[-1]
            left = self._clock.remaining(total - step)
            parts += [
                self._table(),
                Text(f"step {step} of {total}" + (f", about {duration(left)} left" if left else "")),
            ]
        return RichGroup(*parts)

    def _table(self) -> Table:
        from rich.table import Table

        records = [record for _, _, record in self._rows]
        columns = [c for c in COLUMNS if any(key in r for r in records for key in c.keys)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("step", *(c.title for c in columns)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, _, record in self._rows:
            table.add_row(str(step), *(cell(c, record) for c in columns))
        return table


def cell(column: Column, record: Metrics) -> str:
    """The text of one value; empty where the record has none."""
    for key in column.keys:
        if record.get(key) is not None:
            return format(float(record[key]), column.format)
    return ""


def stage_text(name: str, line: StageLine, now: float) -> str:
    """`▶ sft  running  1.2 s  not done yet`; the detail of a stage that has ended stands in for its duration."""
    elapsed = None if line.detail and line.status != "running" else line.elapsed(now)
    # a stage that begins at this moment has no duration worth a word
    shown = duration(elapsed) if elapsed is not None and (elapsed >= 0.1 or line.status != "running") else ""
    parts = [_MARKS.get(line.status, "?"), name, line.status, shown]
    return "  ".join(p for p in [*parts, line.detail] if p)


def step_text(step: int, total: int, record: Metrics, left: float | None = None) -> str:
    """`step 12/50  reward 0.512  accuracy 51.2%  ...  eta 1m20s` on one line."""
    shown = [f"{c.title} {text}" for c in COLUMNS if (text := cell(c, record))]
    eta = [f"eta {duration(left)}"] if left else []
    return "  ".join([f"step {step}/{total}", *shown, *eta])


def duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3m05s`, `2h10m`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
