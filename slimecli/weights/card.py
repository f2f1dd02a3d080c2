"""The README.md of an exported model: where it comes from and what was measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from slimecli import __version__, files

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.rundir import RunDir


def model_card(run: RunDir, recipe: Recipe, step: int, notes: dict[str, Any]) -> str:
    """Markdown with the front matter that the hub reads.

    Args:
        notes: manifest of save_hf_folder.
    """
    base = recipe.model.path or recipe.model.name
    front = ["---", "library_name: transformers", "tags: [slime, reinforcement-learning]"]
    if recipe.model.source == "hub":
        from slimecli.model_specs import get_spec

        front.append(f"base_model: {get_spec(recipe.model.name).repo}")
    lines = [*front, "---", "", f"# {run.name}, step {step}", "", recipe.title, ""]
    lines += [
        "| | |",
        "|---|---|",
        f"| start | {base} ({recipe.model.source}) |",
        f"| algorithm | {recipe.algo.name if step else 'sft' if recipe.sft.steps else 'none'} |",
        f"| steps | {step} of {recipe.steps}, after {recipe.sft.steps} SFT steps |",
        f"| data | {recipe.data.source or recipe.data.train} |",
        f"| reward | {recipe.reward.path or recipe.reward.type} |",
        f"| seed | {recipe.seed} |",
        f"| weights | {notes['tensors']} tensors, {notes['bytes']} bytes, {notes['dtype']} |",
        f"| fingerprint | `{notes['fingerprint']}` |",
        f"| made by | slime {__version__} |",
        "",
    ]
    scores = _scores(run, step)
    if scores:
        lines += ["## Evaluation", "", "| set | how | mean score |", "|---|---|---|", *scores, ""]
    lines += ["## Recipe", "", "```json", json.dumps(recipe.model_dump(mode="json"), indent=1, sort_keys=True), "```"]
    return "\n".join(lines) + "\n"


def _scores(run: RunDir, step: int) -> list[str]:
    """Rows of the evaluation table; empty if this step was not evaluated."""
    path = run.eval_path(step)
    if not path.is_file():
        return []
    sets = files.read_json(path).get("sets", {})
    return [
        f"| {name} | {how} | {result['mean']:.4f} |"
        for name, modes in sorted(sets.items())
        for how, result in sorted(modes.items())
        if isinstance(result, dict) and "mean" in result
    ]
