"""`slime plan` and prepare-data on live conversations."""

from slimecli.plan_rollout import check_rollout
from slimecli.recipe import load_recipe

LIVE = ("data.train='live:'",)


def problems(*sets):
    return list(check_rollout(load_recipe(overrides=(*LIVE, *sets)), None))


def test_a_live_recipe_is_fine_and_needs_no_engine():
    assert problems() == []
    recipe = load_recipe(overrides=LIVE)
    assert recipe.data.is_live and recipe.is_served_elsewhere
    assert not load_recipe(overrides=(*LIVE, "eval.interval=5")).is_served_elsewhere
    assert not load_recipe(overrides=(*LIVE, "engine.urls=['http://127.0.0.1:1']")).is_served_elsewhere
    assert not load_recipe(overrides=("data.train='x.jsonl'",)).is_served_elsewhere


def test_what_has_no_effect_is_named():
    assert any("rollout.custom_generate" in p for p in problems("rollout.custom_generate='a.py:b'"))
    assert any("live.max_staleness" in p for p in problems("rollout.max_staleness=2"))
    assert any("data.holdout" in p for p in problems("data.holdout=5"))
    (gone,) = problems("data.train='live:/nowhere'")
    assert "there is no run at /nowhere" in gone
