"""`slime report`: a run as one HTML file; and a bundle of its small files to send with a question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimecli.commands._options import JsonOpt, RunOpt, TextOutOpt, is_stdout, not_stdout, refuse_idle

if TYPE_CHECKING:
    from pathlib import Path

    from slimecli.rundir import RunDir

EXAMPLES = [
    "slime report --run quickstart",
    "slime report --run quickstart --out report.html --bundle quickstart.zip",
    "slime report --run quickstart --out - > report.html",
]

BUNDLED = (
    "run.json",
    "recipe*",
    "stages/*.json",
    "metrics.jsonl",
    "perf.jsonl",
    "verdicts.jsonl",
    "error.json",
    "eval/*.json",
    "logs/attempt_*/*.log",
    "sft/metrics.jsonl",
    "sft/perf.jsonl",
)
"""what a bundle holds: everything that explains a run, no weights and no training samples"""


def write_report(run: RunDir, out: Path) -> Path:
    """Write the HTML report."""
    from slimecli import files
    from slimecli.observe.report import render_report

    files.write_text(out, render_report(run))
    return out


def write_bundle(run: RunDir, out: Path) -> list[str]:
    """Write a zip of the run's records and return the names in it."""
    import io
    import zipfile

    from slimecli import files
    from slimecli.observe.report import render_report

    names = sorted({p for pattern in BUNDLED for p in run.root.glob(pattern) if p.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in names:
            archive.write(path, f"{run.name}/{path.relative_to(run.root)}")
        archive.writestr(f"{run.name}/report.html", render_report(run))
    files.write_bytes(out, buffer.getvalue())
    return [str(p.relative_to(run.root)) for p in names] + ["report.html"]


def cli(
    run: Annotated[str, typer.Argument(metavar="[NAME|DIR]", help="the run")] = "",
    run_option: RunOpt = "",
    out: TextOutOpt = "",
    bundle: Annotated[
        str, typer.Option("--bundle", metavar="FILE.zip", help="also pack the run's records", callback=not_stdout)
    ] = "",
    json_: JsonOpt = False,
) -> None:
    """Write a run as one HTML file: curves, stages, answers before and after, recipe."""
    from pathlib import Path

    from slimecli import console
    from slimecli.errors import UsageError
    from slimecli.observe.report import render_report
    from slimecli.rundir import open_run

    name = run or run_option
    if not name:
        raise UsageError("which run?", "slime report --run NAME; `slime runs` lists them")
    target = open_run(name)
    if is_stdout(out, json_=json_):
        refuse_idle({"--bundle": bundle}, "where the report goes to the standard output", "call it once for each")
        return console.emit_line(render_report(target).rstrip("\n"))
    result: dict[str, Any] = {"report": str(write_report(target, Path(out) if out else target.report_path))}
    if bundle:
        result["bundle"], result["bundled"] = bundle, write_bundle(target, Path(bundle))
    if json_:
        return console.emit(result)
    console.emit_line(result["report"])
    if bundle:
        console.emit_line(bundle)
        console.note(f"{len(result['bundled'])} files, without weights and training samples")
    return None
