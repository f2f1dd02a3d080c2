"""The last screen of a run: what it achieved, where the time went, what to type next."""

from __future__ import annotations

import shlex
from typing import Any

from slimecli import console
from slimecli.observe.display import duration
from slimecli.observe.records import RunRecords, first_last, read_run
from slimecli.rundir import RunDir, run_path


def summarise(run: RunDir) -> dict[str, Any]:
    """The numbers of the last screen, as `slime run --json` prints them.

    Returns: {"run", "steps", "accuracy": {set: {kind: [before, after]}}, "reward": [first, last],
    "response_length": [first, last], "not_compared": [sentence], "failed_answers": n, "stage_seconds": {...},
    "phase_seconds": {...}, "export": path or ""}.
    """
    records = read_run(run)
    return {
        "run": str(run.root),
        "steps": max((int(r["step"]) for r in records.metrics), default=0),
        "accuracy": _accuracy(records),
        "not_compared": records.eval_breaks(),
        "reward": first_last(records.series("rollout/reward")),
        "response_length": first_last(records.series("rollout/response_length")),
        "stage_seconds": {s["stage"]: s["seconds"] for s in records.stages if s.get("seconds") is not None},
        "phase_seconds": records.phase_seconds(),
        "failed_answers": int(sum(n for _, n in records.series("rollout/failed"))),
        "export": str(run.export_dir) if (run.export_dir / "config.json").is_file() else "",
    }


def _accuracy(records: RunRecords) -> dict[str, dict[str, tuple[float, float]]]:
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for name in records.eval_sets:
        for kind in ("sampled", "greedy"):
            pair = first_last(records.eval_series(name, kind))
            if pair:
                result.setdefault(name, {})[kind] = pair
    return result


def show_summary(run: RunDir) -> None:
    """Print the last screen to stderr."""
    for line in summary_lines(summarise(run)):
        console.say(line)
    console.say("\nnext:")
    for command, why in next_commands(run):
        console.hint(command, why)


def summary_lines(data: dict[str, Any]) -> list[str]:
    """The summary as text, without what to type next."""
    lines = ["", f"run {data['run']}: {data['steps']} steps"]
    rows = [
        (f"{name} accuracy, {kind}", f"{pair[0]:.1%}", f"{pair[1]:.1%}")
        for name, kinds in data["accuracy"].items()
        for kind, pair in kinds.items()
    ]
    if data["reward"]:
        rows.append(("training reward", f"{data['reward'][0]:.3f}", f"{data['reward'][1]:.3f}"))
    if data["response_length"]:
        first, last = data["response_length"]
        rows.append(("answer length (tokens)", f"{first:.1f}", f"{last:.1f}"))
    if rows:
        width = max(len(r[0]) for r in rows)
        lines += ["", f"{'':<{width}}  {'before':>8}  {'after':>8}"]
        lines += [f"{name:<{width}}  {before:>8}  {after:>8}" for name, before, after in rows]
    if data["not_compared"]:
        lines += ["", *data["not_compared"]]
    if data["failed_answers"]:
        lines += [
            "",
            f"{data['failed_answers']} answers failed and were not trained on: `failure` in the samples says why",
        ]
    lines += _time_lines("time per stage", data["stage_seconds"])
    lines += _time_lines("time in the loop", data["phase_seconds"])
    if data["export"]:
        lines += ["", f"exported model: {data['export']}"]
    return lines


def _time_lines(title: str, seconds: dict[str, float]) -> list[str]:
    total = sum(seconds.values())
    if not total:
        return []
    parts = [f"{name} {duration(s)} ({s / total:.0%})" for name, s in seconds.items()]
    return ["", f"{title}: {duration(total)} = " + " + ".join(parts)]


def next_commands(run: RunDir) -> list[tuple[str, str]]:
    """(command, why) that fit this run, with its own name filled in."""
    name = shlex.quote(run.name) if run_path(run.name) == run.root else run.quoted
    done = max((int(r["step"]) for r in run.read_records(run.metrics_path)), default=0)
    planned = run.recipe().steps
    if done < planned:
        return [(f"slime run --resume --run {name}", f"go on to step {planned}"), (f"slime runs show {name}", "so far")]
    return [
        (f"slime report --run {name}", "curves and samples in one HTML file"),
        (f"slime eval --run {name}", "score the last weights again"),
        (f"slime serve --run {name}", "talk to the model over HTTP"),
        (f"slime export --run {name}", "a Hugging Face folder"),
    ]
