"""Reading a run's own records back: the one place that knows which file holds which number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimecli import files
from slimecli.errors import ExitCode
from slimecli.rundir import RunDir

PHASES = ("collect", "learn", "publish", "measure", "checkpoint")
"""the verbs of the loop and its commit, as `seconds/<phase>` in perf.jsonl"""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Everything that summaries, reports and watchers show, as it lies on disk."""

    metrics: list[dict[str, Any]]
    """one per step, in step order"""
    perf: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    """stages/*.json in the order in which they ended"""
    evals: dict[int, dict[str, Any]]
    """step -> set name -> {"sampled": {...}, "greedy": {...}}"""
    error: dict[str, Any] | None
    """error.json of a failed attempt"""

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) for every step that reports `key`, in metrics or perf."""
        found = [(r["step"], r[key]) for r in [*self.metrics, *self.perf] if isinstance(r.get(key), int | float)]
        return sorted((int(step), float(value)) for step, value in found)

    def eval_series(self, set_name: str, kind: str) -> list[tuple[int, float]]:
        """(step, mean score) of one evaluation set; kind is `sampled` or `greedy`.

        Only what was measured like the newest one: scores of different specs are not one curve, see `eval_breaks`.
        """
        found = self._measured(set_name, kind)
        last = found[-1][1].get("spec_hash") if found else None
        return [(step, float(result["mean"])) for step, result in found if result.get("spec_hash") == last]

    def eval_spec(self, set_name: str, kind: str) -> str:
        """Hash of how the newest score of a set was measured; scores of runs compare only where it is equal."""
        found = self._measured(set_name, kind)
        return str(found[-1][1].get("spec_hash", ""))[:8] if found else ""

    def eval_breaks(self) -> list[str]:
        """What `eval_series` leaves out, one sentence per set and mode; usually nothing."""
        said = []
        for name in self.eval_sets:
            for kind in ("sampled", "greedy"):
                shown = {step for step, _ in self.eval_series(name, kind)}
                left = [step for step, _ in self._measured(name, kind) if step not in shown]
                if left:
                    steps = ", ".join(map(str, left))
                    how = f"slime eval --compare RUN@{left[-1]} RUN@{max(shown)}"
                    said.append(
                        f"{name}, {kind}: step {steps} was measured with another spec than step {max(shown)} and is "
                        f"not shown beside it; `{how}` names the difference"
                    )
        return said

    def _measured(self, set_name: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [
            (step, sets[set_name][kind]) for step, sets in sorted(self.evals.items()) if kind in sets.get(set_name, {})
        ]

    @property
    def eval_sets(self) -> list[str]:
        """Names of all evaluated sets."""
        return sorted({name for sets in self.evals.values() for name in sets})

    def phase_seconds(self) -> dict[str, float]:
        """Phase -> seconds over the whole loop; phases that never ran are left out."""
        totals = {phase: sum(value for _, value in self.series(f"seconds/{phase}")) for phase in PHASES}
        return {phase: seconds for phase, seconds in totals.items() if seconds}


def read_run(run: RunDir) -> RunRecords:
    """All records of a run, also of one that is still working or has failed."""
    stages = [(p.stat().st_mtime, files.read_json(p)) for p in (run.root / "stages").glob("*.json")]
    evals = [files.read_json(p) for p in sorted((run.root / "eval").glob("step_*.json"))]
    return RunRecords(
        metrics=run.read_records(run.metrics_path),
        perf=run.read_records(run.perf_path),
        stages=[record for _, record in sorted(stages, key=lambda pair: pair[0])],
        evals={int(e["step"]): e.get("sets", {}) for e in evals},
        error=files.read_json(run.error_path) if run.error_path.is_file() else None,
    )


def run_status(run: RunDir, records: RunRecords) -> str:
    """One word: `running`, `done`, `failed`, `stopped` (neither finished nor working) or `new`."""
    if run.is_locked():
        return "running"
    statuses = {str(s.get("stage")): str(s.get("status")) for s in records.stages}
    if records.error is not None and records.error.get("exit_code") == ExitCode.INTERRUPTED:
        return "stopped"
    if records.error is not None or "failed" in statuses.values():
        return "failed"
    if not statuses:
        return "new"
    loop = statuses.get("loop", statuses.get("train", ""))
    planned = run.recipe().steps
    reached = max((r["step"] for r in records.metrics), default=0)
    is_done = loop == "done" or (planned == 0 and all(s == "done" for s in statuses.values()))
    return "done" if is_done or (planned and reached >= planned) else "stopped"


def first_last(series: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """First and last value, or None for an empty series."""
    return (series[0][1], series[-1][1]) if series else None
