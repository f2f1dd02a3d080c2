"""Where the time goes: seconds and tokens per phase of a step, for perf.jsonl."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Iterator


class Clock:
    """Collects the phases of one step; `lap` hands them over and starts the next."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._values: defaultdict[str, float] = defaultdict(float)
        self._notes: dict[str, float] = {}
        self._tokens = 0
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere, perhaps beside a phase."""
        self._seconds[name] += seconds

    def note(self, name: str, value: float) -> None:
        """A value of this step that is not seconds, under its own name; a later one replaces it."""
        self._notes[name] = value

    def tokens(self, count: int) -> None:
        """Count tokens trained on."""
        self._tokens += count

    def count(self, name: str, value: float) -> None:
        """Add to a value of this step that is not there in most of them: restarts, for one."""
        self._values[name] += value

    def lap(self) -> dict[str, float]:
        """`seconds/...`, `tokens_per_s` and peak memory since the last lap."""
        now = time.perf_counter()
        total = now - self._start
        record = {f"seconds/{k}": round(v, 6) for k, v in sorted(self._seconds.items())}
        record |= dict(sorted(self._notes.items()))
        record["seconds/step"] = round(total, 6)
        record["tokens_per_s"] = round(self._tokens / total, 1) if total > 0 else 0.0
        record["rss_mb/driver"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        record |= {name: round(value, 6) for name, value in sorted(self._values.items())}
        self._values.clear()
        self._seconds.clear()
        self._notes.clear()
        self._tokens = 0
        self._start = now
        return record
