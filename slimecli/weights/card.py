"""The README.md of an exported model: where it comes from, what was measured, how to make it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli import __version__, files

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir

TAGS = "tags: [slime, reinforcement-learning]"


def model_card(run: RunDir, recipe: Recipe, step: int, notes: dict[str, Any], command: str = "") -> str:
    """Markdown with the front matter that the hub reads.

    Args:
        notes: what DONE.json of the export holds.
        command: that made the export.
    """
    repo = _repo(recipe)
    base = repo or recipe.model.path or recipe.model.name
    lines = _head(f"{run.name}, step {step}", base_model=repo)
    lines += [recipe.title, ""]
    facts = {
        "base model": f"{base}{_revision(run)} ({recipe.model.source})",
        "algorithm": recipe.algo.name.rpartition("/")[2] if step else "sft" if recipe.sft.steps else "none",
        "steps": f"{step} of {recipe.steps}, after {recipe.sft.steps} SFT steps",
        "data": _data(run, recipe),
        "reward": recipe.reward.path or recipe.reward.type,
        "seed": recipe.seed,
        **_weights(notes),
        "trained by": f"slime {files.read_json(run.manifest_path)['slime']}",
        "exported by": f"slime {code_version()}",
    }
    lines += _table(facts)
    lines += _scores(run, step)
    lines += ["## Make it again", "", "```console", *(f"$ {c}" for c in [*_commands(run), command] if c), "```", ""]
    lines += ["## Recipe", "", "```json", json.dumps(recipe.model_dump(mode="json"), indent=1, sort_keys=True), "```"]
    return "\n".join(lines) + "\n"


def folder_card(notes: dict[str, Any], command: str) -> str:
    """The card of an export that is not of a run. A card may be published: folders go by their last name."""
    source = Path(str(notes.get("source", ""))).name
    lines = _head(source or "model")
    facts = {"made from": f"{source} ({notes['from']})", **_weights(notes), "exported by": f"slime {code_version()}"}
    lines += [*_table(facts), "## Make it again", "", "```console", f"$ {command}", "```"]
    return "\n".join(lines) + "\n"


def code_version() -> str:
    """The version, with the commit when slime runs from a git checkout."""
    git = Path(__file__).resolve().parents[2] / ".git"
    if not (git / "HEAD").is_file():
        return __version__
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        packed = (git / "packed-refs").read_text(encoding="utf-8") if (git / "packed-refs").is_file() else ""
        found = {ref: commit for commit, _, ref in (line.partition(" ") for line in packed.splitlines())}
        head = (git / name).read_text(encoding="utf-8").strip() if (git / name).is_file() else found.get(name, "")
    return f"{__version__} ({head[:12]})" if head else __version__


def _head(title: str, base_model: str = "") -> list[str]:
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", TAGS]
    front += [f"base_model: {base_model}"] if base_model else []
    return [*front, "---", "", f"# {title}", ""]


def _table(facts: dict[str, Any]) -> list[str]:
    rows = ((name, str(value).replace("|", r"\|")) for name, value in facts.items())
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _weights(notes: dict[str, Any]) -> dict[str, str]:
    quantized = f", linear layers in {notes['quantized']}" if notes.get("quantized") else ""
    return {
        "weights": f"{notes['tensors']} tensors, {notes['bytes']} bytes, {notes['dtype']}{quantized}",
        "fingerprint": f"`{notes['fingerprint']}`",
    }


def _repo(recipe: Recipe) -> str:
    """The hub repository that training started from; empty where it started from elsewhere."""
    if recipe.model.source != "hub":
        return ""
    from slimecli.model_specs import get_spec

    return get_spec(recipe.model.name).repo


def _revision(run: RunDir) -> str:
    done = files.read_json(run.model_dir / files.DONE) if (run.model_dir / files.DONE).is_file() else {}
    revision = done.get("commit") or done.get("revision")
    return f" @ {revision}" if revision else ""


def _data(run: RunDir, recipe: Recipe) -> str:
    """Source, arguments and number of rows."""
    section = recipe.data
    arguments = f" {json.dumps(section.source_args, sort_keys=True)}" if section.source_args else ""
    path = run.data_dir / "train.jsonl"
    rows = sum(1 for _ in path.open("rb")) if path.is_file() else 0
    return f"{section.source or section.train}{arguments}" + (f", {rows} prompts" if rows else "")


def _commands(run: RunDir) -> list[str]:
    """What was typed to make the run, and the values it was changed to on the way."""
    manifest = files.read_json(run.manifest_path)
    program, *words = manifest.get("argv") or [""]
    begun = [shlex.join([Path(program).name, *words])] if words else []
    changes = [c["why"] for c in manifest.get("recipe_changes", []) if c.get("why")]
    return [*begun, *(f"slime run --resume --run {run.name} {why}" for why in changes)]


def _scores(run: RunDir, step: int) -> list[str]:
    """Evaluation at the step, beside that of the start; the training reward when there is one."""
    before, after = _evaluated(run, 0), _evaluated(run, step)
    rows = [
        f"| {name} | {how} | {_mean(before, after, name, how)} | {_mean(after, after, name, how)} |"
        for name, how in sorted(after)
    ]
    out = ["## Evaluation", "", "| set | how | start | mean score |", "|---|---|---|---|", *rows, ""] if rows else []
    rewards = [
        r["rollout/reward"]
        for r in run.read_records(run.metrics_path)
        if 0 < r["step"] <= step and "rollout/reward" in r
    ]
    if rewards:
        out += [f"Training reward: {rewards[0]:.4f} in the first step, {rewards[-1]:.4f} in step {step}.", ""]
    return out


_Scores = dict[tuple[str, str], tuple[float, str]]
"""(set, how) -> mean score, hash of how it was measured"""


def _evaluated(run: RunDir, step: int) -> _Scores:
    """Empty if this step was not evaluated."""
    path = run.eval_path(step)
    sets = files.read_json(path).get("sets", {}) if path.is_file() else {}
    return {
        (name, how): (float(result["mean"]), str(result.get("spec_hash", "")))
        for name, modes in sets.items()
        for how, result in modes.items()
        if isinstance(result, dict) and "mean" in result
    }


def _mean(scores: _Scores, beside: _Scores, name: str, how: str) -> str:
    """Empty where it was not measured, or not in the way of the score that it stands beside."""
    mean, spec = scores.get((name, how), (0.0, None))
    return f"{mean:.4f}" if spec == beside[name, how][1] else ""
