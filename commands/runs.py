"""`slime runs`: what was run, how far it came, what it reached."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slimecli.commands._options import JsonOpt

EXAMPLES = [
    "slime runs",
    "slime runs show quickstart",
]


def list_all() -> list[dict[str, Any]]:
    """[{"run", "status", "step", "reward", "held-out", "spec", "created", "title"}], oldest first.

    Held-out scores of two runs compare only where `spec` is equal.
    """
    from slimecli.rundir import list_runs

    return [brief(run) for run in list_runs()]


def brief(run: Any) -> dict[str, Any]:
    """One line about a run. A run that cannot be read is listed with the reason, since one must not hide the others."""
    from slimecli import files
    from slimecli.errors import SlimeError
    from slimecli.observe.records import read_run, run_status

    try:
        manifest, records, recipe = files.read_json(run.manifest_path), read_run(run), run.recipe()
        rewards = records.series("rollout/reward")
        scores = [s for name in records.eval_sets for s in records.eval_series(name, "sampled")[-1:]]
        specs = [s for name in records.eval_sets if (s := records.eval_spec(name, "sampled"))]
        done = max((int(r["step"]) for r in records.metrics), default=0)
        return {
            "run": run.name,
            "status": run_status(run, records),
            "step": f"{done}/{recipe.steps}",
            "reward": round(rewards[-1][1], 4) if rewards else "",
            "held-out": round(scores[0][1], 4) if scores else "",
            "spec": specs[0] if specs else "",
            "created": manifest.get("created", ""),
            "title": manifest.get("title", ""),
        }
    except (SlimeError, OSError) as error:
        return {"run": run.name, "status": "unreadable", "title": str(error).partition("\n")[0]}


def show_run(name: str) -> dict[str, Any]:
    """Everything about one run: its line, stages, summary, error, checkpoints."""
    from slimecli.observe.records import read_run
    from slimecli.observe.summary import summarise
    from slimecli.rundir import open_run

    run = open_run(name)
    records = read_run(run)
    stages = [{k: s.get(k) for k in ("stage", "status", "seconds", "command")} for s in records.stages]
    return {
        **brief(run),
        "folder": str(run.root),
        "checkpoints": run.checkpoints(),
        "stages": stages,
        "summary": summarise(run),
        "error": records.error,
    }


def cli(
    action: Annotated[str, typer.Argument(metavar="[show]", help="what to do; nothing: list")] = "",
    name: Annotated[str, typer.Argument(metavar="[NAME|DIR]", help="run to show")] = "",
    json_: JsonOpt = False,
) -> None:
    """List runs with status, step and reward, or show one."""
    from slimecli import console, env
    from slimecli.errors import UsageError

    if not action:
        rows = list_all()
        if json_:
            console.emit(rows)
        elif rows:
            console.table(rows, ["run", "status", "step", "reward", "held-out", "spec", "created", "title"])
        else:
            console.note(f"no runs under {env.runs_root()}")
            console.hint("slime run --recipe quickstart")
        return
    if action != "show" or not name:
        raise UsageError(f"`slime runs {action}` is not complete", "slime runs | slime runs show NAME")
    found = show_run(name)
    if json_:
        console.emit(found)
        return
    _print_run(found)


def _print_run(found: dict[str, Any]) -> None:
    from slimecli import console
    from slimecli.observe.summary import summary_lines

    for key in ("run", "status", "step", "reward", "held-out", "spec", "created", "title", "folder"):
        console.emit_line(f"{key}\t{found.get(key, '')}")
    console.emit_line(f"checkpoints\t{' '.join(str(c) for c in found['checkpoints'])}")
    for stage in found["stages"]:
        seconds = "" if stage["seconds"] is None else f"{stage['seconds']:.1f} s"
        console.emit_line(f"stage\t{stage['stage']}\t{stage['status']}\t{seconds}")
    for line in summary_lines(found["summary"])[3:]:
        console.emit_line(line)
    if found["error"]:
        console.emit_line(f"error\t{found['error'].get('what', '')}")
