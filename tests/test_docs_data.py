"""docs/data.md and docs/evaluation.md name everything that there is, and nothing else."""

import re
import tomllib
from pathlib import Path

from slimecli.data_tools.converters import CONVERTERS
from slimecli.data_tools.folders import SUFFIXES
from slimecli.recipe import shipped_recipes, validate_recipe
from slimecli.recipe_rollout import EvalSetSection
from slimecli.recipe_sections import CurriculumSection
from slimecli.rollout.eval_spec import make_spec
from slimecli.rollout.scores import summarise_scores
from slimecli.types import Sample

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, EVALUATION, RECIPES = ((DOCS / f"{n}.md").read_text(encoding="utf-8") for n in ("data", "evaluation", "recipes"))


def first_columns(text, heading):
    """Names in the first column of the first table after a heading."""
    rows = re.search(rf"## {re.escape(heading)}\n.*?\n(\|.*?)(?:\n\n|\Z)", text, re.DOTALL)[1].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_fields_of_an_evaluation_set():
    assert first_columns(EVALUATION, "Sets") == set(EvalSetSection.model_fields)
    (example,) = re.findall(r"```toml\n(.*?)```", EVALUATION, re.DOTALL)
    recipe = validate_recipe(tomllib.loads(example))
    assert recipe.eval.sets["aime"].n_samples_per_prompt == 32 and recipe.eval.sets["gsm8k"].path == "gsm8k/test.jsonl"


def test_what_an_evaluation_says():
    named = first_columns(EVALUATION, "Scores")
    assert set(summarise_scores([[1.0], [0.0]])) <= named
    spec = make_spec([Sample(prompt="p")], validate_recipe({}), {}, 1, "")
    assert first_columns(EVALUATION, "What was measured") == set(spec)


def test_converters_formats_and_curriculum():
    assert first_columns(DATA, "Well-known sets") == set(CONVERTERS)
    assert all(f"`{suffix}`" in DATA for suffix in SUFFIXES)
    levels = first_columns(DATA, "Curriculum")
    assert {name.partition(" ")[0] for name in levels} == set(CurriculumSection.model_fields) - {"rate", "floor"}


def test_every_shipped_recipe_is_listed():
    assert first_columns(RECIPES, "Shipped recipes") == set(shipped_recipes())
