"""A run as one HTML file: no scripts, no fonts, no network; it opens anywhere and can be sent around."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slimecli import files
from slimecli.observe.curves import curve
from slimecli.observe.display import duration
from slimecli.observe.records import RunRecords, read_run, run_status
from slimecli.observe.summary import summarise
from slimecli.rundir import RunDir

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1c1c1c }
h1 { margin-bottom: 0 } h2 { margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse } td, th { padding: .25em .8em; text-align: left; border-bottom: 1px solid #eee }
td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; white-space: pre-wrap }
.curves { display: flex; flex-wrap: wrap; gap: 1em } .bad { color: #b00020 } .dim { color: #777 }
"""

_CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("rollout/reward",)),
    ("training accuracy", ("rollout/accuracy",)),
    ("KL", ("train/kl", "train/ppo_kl")),
    ("entropy (nats)", ("train/entropy",)),
    ("answer length (tokens)", ("rollout/response_length",)),
    ("log-prob gap between engine and trainer", ("train/logprob_gap",)),
    ("loss", ("train/loss",)),
    ("gradient norm", ("train/grad_norm",)),
    ("tokens per second", ("tokens_per_s",)),
    ("seconds per step", ("seconds/step",)),
)
"""(title, metrics drawn into one frame); a frame without data is left out"""

SAMPLES_SHOWN = 8
"""prompts whose answers are shown before and after"""


_CONTROLS = {n: 0x2400 + n for n in range(32) if chr(n) not in "\t\n\r"} | {127: 0x2421}
"""control characters, which a model may well say and HTML may not hold -> their pictures"""


def render_report(run: RunDir) -> str:
    """The whole page."""
    records = read_run(run)
    manifest = files.read_json(run.manifest_path)
    title = html.escape(f"{run.name}: {manifest.get('title', '')}".rstrip(": "))
    where = html.escape(f"{run.root}, {run_status(run, records)}, slime {manifest.get('slime', '')}")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{where}</p>',
        _error(records),
        _before_after(run),
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(_curves(records))}</div>',
        _stages(records),
        _answers(records),
        _recipe(run),
        "<h2>Environment</h2>",
        f"<pre>{html.escape(json.dumps(manifest, indent=2, sort_keys=True))}</pre>",
    ]
    body = "\n".join(p for p in parts if p)
    body = body.translate(_CONTROLS)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _error(records: RunRecords) -> str:
    if records.error is None:
        return ""
    return f'<h2 class="bad">Error</h2><pre>{html.escape(str(records.error.get("what", "")))}</pre>'


def _before_after(run: RunDir) -> str:
    data = summarise(run)
    rows = [
        (f"{name} accuracy, {kind}", f"{pair[0]:.1%}", f"{pair[1]:.1%}")
        for name, kinds in data["accuracy"].items()
        for kind, pair in kinds.items()
    ]
    for title, key in (("training reward", "reward"), ("answer length (tokens)", "response_length")):
        if data[key]:
            rows.append((title, f"{data[key][0]:.3g}", f"{data[key][1]:.3g}"))
    if not rows:
        return ""
    left = "".join(f'<p class="bad">{html.escape(sentence)}</p>' for sentence in data["not_compared"])
    return "<h2>Before and after</h2>" + _table(("", "before", "after"), rows) + left


def _curves(records: RunRecords) -> list[str]:
    frames = []
    for name in records.eval_sets:
        lines = {kind: records.eval_series(name, kind) for kind in ("sampled", "greedy")}
        frames.append(curve(f"held-out accuracy: {name}", {k: v for k, v in lines.items() if v}))
    for title, keys in _CURVES:
        lines = {key: points for key in keys if (points := records.series(key))}
        frames.append(curve(title, lines) if lines else "")
    return [f for f in frames if f]


def _stages(records: RunRecords) -> str:
    if not records.stages:
        return ""
    rows = [
        (s.get("stage", ""), s.get("status", ""), _seconds(s.get("seconds")), s.get("host", ""), s.get("command", ""))
        for s in records.stages
    ]
    phases = [(name, "", _seconds(seconds), "", "") for name, seconds in records.phase_seconds().items()]
    return "<h2>Stages</h2>" + _table(("stage", "status", "time", "host", "the same alone"), rows + phases)


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _answers(records: RunRecords) -> str:
    """Answers to the same held-out prompts at the first and at the last evaluation."""
    if not records.evals:
        return ""
    first, last = min(records.evals), max(records.evals)
    blocks = []
    for name in records.eval_sets:
        before, after = (_samples(records.evals[step].get(name, {})) for step in (first, last))
        known = {json.dumps(s.get("prompt")): s for s in before}
        rows = []
        for sample in after[:SAMPLES_SHOWN]:
            old = known.get(json.dumps(sample.get("prompt")), {})
            shown = [_text(sample.get("prompt")), str(sample.get("label", "")), old.get("response", "")]
            rows.append((*shown, old.get("reward", ""), sample.get("response", ""), sample.get("reward", "")))
        if rows:
            head = ("prompt", "wanted", f"step {first}", "reward", f"step {last}", "reward")
            blocks.append(f"<h2>Answers: {html.escape(name)}</h2>" + _table(head, rows))
    return "".join(blocks)


def _samples(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    for kind in ("greedy", "sampled"):
        found: list[dict[str, Any]] = scores.get(kind, {}).get("samples", [])
        if found:
            return found
    return []


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(m.get("content", "")) for m in prompt or [])


def _recipe(run: RunDir) -> str:
    """The recipe as written by its author, then everything in force."""
    written = (run.root / "recipe.toml").read_text(encoding="utf-8") if (run.root / "recipe.toml").is_file() else ""
    resolved = run.recipe().to_json()
    return (
        f"<h2>Recipe</h2><pre>{html.escape(written)}</pre>"
        f"<details><summary>all values in force</summary><pre>{html.escape(resolved)}</pre></details>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"
