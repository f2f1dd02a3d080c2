"""`slime watch`: follow a run from its own records, from another terminal or after the fact."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, RunOpt

if TYPE_CHECKING:
    from slimecli.observe.display import Progress
    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime watch --run quickstart",
    "slime watch --run quickstart --json",
]


def follow(run: RunDir, interval_s: float = 0.5) -> Iterator[dict[str, Any]]:
    """What happens in a run, as it happens: what is on disk already first, then until no writer holds the run.

    Yields: {"kind": "stage", "stage", "status", "detail"} and
    {"kind": "step", "stage", "step", "total", "metrics", "perf"}.
    """
    from slimecli.rundir import RunDir

    seen: dict[str, Any] = {}
    tails = {"sft": RunDir(run.sft_dir), "loop": run}
    while True:
        # asked before reading, so that the last records of a run that ends just now are still read
        is_working = run.is_locked()
        yield from _new_stages(run, seen)
        for stage, part in tails.items():
            yield from _new_steps(stage, part, seen)
        if not is_working:
            return
        time.sleep(interval_s)


def _new_stages(run: RunDir, seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from slimecli.observe.records import read_run

    for record in read_run(run).stages:
        name, status = str(record["stage"]), str(record["status"])
        if seen.get(f"stage/{name}") != status:
            seen[f"stage/{name}"] = status
            seconds = record.get("seconds")
            detail = f"{seconds:.1f} s" if seconds is not None else str(record.get("reason", ""))
            yield {"kind": "stage", "stage": name, "status": status, "detail": detail}


def _new_steps(stage: str, part: RunDir, seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not part.manifest_path.is_file():
        return
    total = part.recipe().steps
    perf = {r["step"]: r for r in part.read_records(part.perf_path)}
    for record in part.read_records(part.metrics_path):
        if record["step"] > seen.get(f"step/{stage}", -1):
            seen[f"step/{stage}"] = record["step"]
            step = record["step"]
            yield {
                "kind": "step",
                "stage": stage,
                "step": step,
                "total": total,
                "metrics": record,
                "perf": perf.get(step, {}),
            }


def watch(run: RunDir, *, as_json: bool = False) -> str:
    """Show a run until it ends. Returns its status: done, failed, stopped or new."""
    from slimecli import console
    from slimecli.observe.display import Progress
    from slimecli.observe.records import read_run, run_status

    if as_json:
        for event in follow(run):
            console.emit(event)
    else:
        told: set[str] = set()
        with Progress(run, run.recipe()) as progress:
            for event in follow(run):
                if event["kind"] == "stage":
                    progress.stage(event["stage"], event["status"], event["detail"])
                else:
                    progress.step(event["step"], event["total"], event["metrics"], event["perf"], stage=event["stage"])
                    _tell_breaks(run, event["metrics"], progress, told)
    return run_status(run, read_run(run))


def _tell_breaks(run: RunDir, metrics: dict[str, Any], progress: Progress, told: set[str]) -> None:
    """Say once per set and mode that older held-out scores were measured in another way than the newest."""
    from slimecli.observe.records import read_run

    for sentence in read_run(run).eval_breaks() if any(key.startswith("eval/") for key in metrics) else ():
        about = sentence.partition(":")[0]
        if about not in told:
            told.add(about)
            progress.message(sentence)


def cli(
    run: Annotated[str, typer.Argument(metavar="[NAME|DIR]", help="the run")] = "",
    run_option: RunOpt = "",
    json_: JsonOpt = False,
) -> None:
    """Follow a run live, until it ends. The exit code says how it ended."""
    from slimecli import files
    from slimecli.errors import PartialError, SlimeError, UsageError
    from slimecli.rundir import open_run

    name = run or run_option
    if not name:
        raise UsageError("which run?", "slime watch --run NAME; `slime runs` lists them")
    target = open_run(name)
    status = watch(target, as_json=json_)
    again = f"slime run --resume --run {target.quoted}"
    if status == "failed":
        error = files.read_json(target.error_path) if target.error_path.is_file() else {}
        raise SlimeError(f"run {target.name} failed: {error.get('what', 'see its stages')}", error.get("fix") or again)
    if status != "done":
        raise PartialError(f"run {target.name} is {status}: it is neither finished nor being worked on", again)
