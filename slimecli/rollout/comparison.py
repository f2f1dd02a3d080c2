"""Two evaluations side by side: refused where they measured different things, paired prompt by prompt where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimecli import files
from slimecli.errors import DataError, MissingStageError, UsageError
from slimecli.rollout.eval_spec import differences
from slimecli.rollout.scores import paired_difference, unpaired_difference
from slimecli.rundir import open_run, run_path

SHOWN = 80
"""characters of a differing value in a message"""

Sets = dict[str, dict[str, dict[str, Any]]]
"""set name -> mode -> result of slimecli.rollout.evaluate"""


def load_scores(place: str) -> tuple[str, Sets]:
    """What was measured, and where it lies.

    Args:
        place: a file that `slime eval --json` or a run wrote, a run (its newest evaluation), or RUN@STEP.
    """
    path = Path(place).expanduser()
    if not path.is_file():
        path = _of_run(place)
    data = files.read_json(path)
    sets = data.get("sets") if isinstance(data, dict) else None
    if not isinstance(sets, dict) or not sets:
        raise DataError(f"{path} holds no evaluation", "name what `slime eval --json` wrote, a run, or RUN@STEP")
    return str(path), sets


def _of_run(place: str) -> Path:
    name, at, step = place.rpartition("@")
    if at and not step.isdigit():
        raise UsageError(f"{place!r}: {step!r} is no step", "write RUN@STEP, e.g. quickstart@100")
    name = name if at else place
    if not (run_path(name) / "run.json").is_file():
        raise UsageError(f"neither a file nor a run: {place}", "name a file of `slime eval --json`, a run, or RUN@STEP")
    run = open_run(name)
    steps = run.eval_steps()
    wanted = int(step) if at else max(steps, default=0)
    if wanted not in steps:
        known = ", ".join(map(str, steps)) or "none"
        command = f"slime eval --run {run.quoted}" + (f" --step {wanted}" if at else "")
        raise MissingStageError(f"run {run.name} has no evaluation of step {wanted} (there are: {known})", command)
    return run.eval_path(wanted)


def compare(first: str, second: str, *, anyway: bool = False) -> dict[str, Any]:
    """The difference between two evaluations, set by set and mode by mode.

    Args:
        first, second: see load_scores.
        anyway: compare what was measured differently, too, and say in what it differs.

    Returns: {"a", "b", "rows": [{"set", "mode", "a", "b", "difference", "stderr", "interval", "prompts", "paired",
    "differs": [[field, value in a, value in b]]}], "only_in": {"a": [...], "b": [...]}}; a difference is b minus a.
    Raises UsageError that names the fields in which the specs differ.
    """
    (path_a, sets_a), (path_b, sets_b) = load_scores(first), load_scores(second)
    kinds_a = {(name, mode) for name, modes in sets_a.items() for mode in modes}
    kinds_b = {(name, mode) for name, modes in sets_b.items() for mode in modes}
    both = sorted(kinds_a & kinds_b)
    if not both and len(sets_a) == len(sets_b) == 1:  # one set each, under different names
        (name_a,), (name_b,) = sets_a, sets_b
        both = sorted((name_a, mode) for mode in sets_a[name_a].keys() & sets_b[name_b].keys())
        sets_b = {name_a: sets_b[name_b]}
        kinds_b = {(name_a, mode) for mode in sets_b[name_a]}
    if not both:
        raise UsageError(
            f"{path_a} ({', '.join(sets_a)}) and {path_b} ({', '.join(sets_b)}) have no set in common",
            "evaluate the same sets: slime eval --data NAME=FILE",
        )
    rows = [_row(name, mode, sets_a[name][mode], sets_b[name][mode]) for name, mode in both]
    if not anyway and any(row["differs"] for row in rows):
        raise UsageError(_refusal(path_a, path_b, rows), "evaluate both in the same way, or compare with --anyway")
    only = {"a": sorted(kinds_a - kinds_b), "b": sorted(kinds_b - kinds_a)}
    return {"a": path_a, "b": path_b, "rows": rows, "only_in": {k: [list(x) for x in v] for k, v in only.items()}}


def _row(name: str, mode: str, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    spec_a, spec_b = a.get("spec"), b.get("spec")
    if not isinstance(spec_a, dict) or not isinstance(spec_b, dict) or "scores" not in a or "scores" not in b:
        raise DataError(
            f"{name}, {mode}: the evaluation does not say what was measured: an older slime made it", "evaluate again"
        )
    differs = differences(spec_a, spec_b)
    is_same_prompts = spec_a["prompts"] == spec_b["prompts"]
    difference = (paired_difference if is_same_prompts else unpaired_difference)(a["scores"], b["scores"])
    return {
        "set": name,
        "mode": mode,
        "a": a["mean"],
        "b": b["mean"],
        **difference,
        "differs": [list(found) for found in differs],
    }


def _refusal(path_a: str, path_b: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{path_a} and {path_b} did not measure the same:"]
    for row in rows:
        for field, a, b in row["differs"]:
            lines.append(f"  {row['set']}, {row['mode']}: {field}: {_short(a)} | {_short(b)}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
