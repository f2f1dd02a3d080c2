"""Checks of the reward section that need nothing but the recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slimecli.errors import nearest
from slimecli.recipe import Recipe
from slimecli.recipe_reward import RewardSection
from slimecli.rundir import RunDir
from slimecli.static import hook_problem, registry_names
from slimecli.topology import MODEL


def check_reward(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """What the named scorers need; whether `reward.type` and `reward.path` exist is looked at with the other names."""
    reward = recipe.reward
    if reward.path:
        if reward.mix:
            yield "`reward.mix` has no effect beside `reward.path`; name that function as a part of the mix"
        return
    if reward.mix and reward.type != "mix":
        yield f"`reward.mix` has no effect with `reward.type` = {reward.type!r}; set that to 'mix'"
    used = [reward.type]
    if reward.type == "mix":
        yield from _mix_problems(reward)
        used += reward.mix
    yield from _missing_settings(reward, {name.removeprefix("boxed_") for name in used})


def _mix_problems(reward: RewardSection) -> Iterator[str]:
    known = registry_names("slimecli.data_tools.rewards", "REWARDS")
    if not reward.mix:
        yield "`reward.type` = 'mix' needs `reward.mix`, e.g. {math = 0.8, format = 0.2}"
    for name in reward.mix:
        if ":" in name:
            problem = hook_problem(name)
            if problem:
                yield f"`reward.mix`: {problem}"
        elif name.removeprefix("boxed_") not in known or name == "mix":
            names = ", ".join(sorted(known))
            yield f"`reward.mix` names {name!r}, which is no scorer{nearest(name, known)}; known: {names}"
    if reward.key and reward.key not in ("score", *reward.mix):
        yield f"`reward.key` = {reward.key!r} is neither `score` nor a part of the mix ({', '.join(reward.mix)})"


def _missing_settings(reward: RewardSection, used: set[str]) -> Iterator[str]:
    compare = reward.tournament.compare
    if "tournament" in used:
        if not reward.group:
            yield "`reward.type` = 'tournament' ranks whole groups: set `reward.group` = true"
        if compare != "judge" and hook_problem(compare):
            yield f"`reward.tournament.compare` = {hook_problem(compare)}"
    if "tournament" in used and compare == "judge":
        used = used | {"judge"}
    for name, field, url in (
        ("remote_rm", "reward.rm_url", reward.rm_url),
        ("judge", "reward.judge.url", reward.judge.url),
    ):
        if name in used and not url.startswith(("http://", "https://", MODEL)):
            yield f"`{field}` = {url!r} is not an http:// address, and {name} asks a server there"
    if reward.judge.low >= reward.judge.high:
        yield f"`reward.judge.low` = {reward.judge.low:g} is not below `reward.judge.high` = {reward.judge.high:g}"
    if "math_verify" in used and importlib.util.find_spec("math_verify") is None:
        yield "`reward.type` = 'math_verify' needs the package math-verify: pip install 'slimecli[math]'"
