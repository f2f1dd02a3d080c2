"""Reward settings that cannot work are found by `slime plan`, without torch and without asking a server."""

import pytest

from slimecli.plan_reward import check_reward
from slimecli.recipe import validate_recipe


def problems(**reward):
    return list(check_reward(validate_recipe({"reward": reward}), None))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"type": "mix"}, "needs `reward.mix`"),
        ({"type": "mix", "mix": {"mth": 1}}, "names 'mth', which is no scorer (did you mean 'math'?)"),
        ({"type": "mix", "mix": {"mix": 1}}, "names 'mix', which is no scorer"),
        ({"type": "mix", "mix": {"none.py:f": 1}}, "there is no file none.py"),
        ({"type": "mix", "mix": {"math": 1}, "key": "format"}, "`reward.key` = 'format' is neither"),
        ({"type": "mix", "mix": {"remote_rm": 1}}, "`reward.rm_url` = ''"),
        ({"mix": {"math": 1}}, "`reward.mix` has no effect with `reward.type` = 'exact'"),
        ({"path": "json:dumps", "mix": {"math": 1}}, "`reward.mix` has no effect beside `reward.path`"),
        ({"type": "remote_rm", "rm_url": "host:80"}, "`reward.rm_url` = 'host:80' is not an http:// address"),
        ({"type": "judge"}, "`reward.judge.url` = ''"),
        ({"type": "boxed_judge"}, "`reward.judge.url` = ''"),
        ({"type": "tournament", "group": True}, "`reward.judge.url` = ''"),
        ({"type": "tournament", "judge": {"url": "http://x"}}, "set `reward.group` = true"),
        ({"type": "tournament", "group": True, "tournament": {"compare": "none.py:f"}}, "there is no file none.py"),
        ({"judge": {"low": 2, "high": 1}}, "`reward.judge.low` = 2 is not below"),
    ],
)
def test_what_cannot_work(reward, message):
    found = problems(**reward)
    assert len(found) == 1 and message in found[0]


@pytest.mark.parametrize(
    "reward",
    [
        {},
        {"type": "boxed_exact"},
        {"type": "mix", "mix": {"math": 0.8, "format": 0.2}, "key": "math"},
        {"type": "remote_rm", "rm_url": "http://h/score"},
        {"type": "tournament", "group": True, "tournament": {"compare": "json:dumps"}},
        {"type": "math_verify"},
    ],
)
def test_what_works(reward):
    assert problems(**reward) == []


def test_a_package_that_is_not_there(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "slimecli[math]" in problems(type="math_verify")[0]
