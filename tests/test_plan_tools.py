"""Tools and generate functions that cannot work are found by `slime plan`, before anything starts."""

import pytest

from slimecli.plan_tools import check_tools
from slimecli.recipe import validate_recipe


def problems(tools=None, generate="tool_loop", **more):
    tree = {"rollout": {"custom_generate": generate}, "tools": tools or {}, **more}
    return list(check_tools(validate_recipe(tree), None))


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "without a tool"),
        ({"use": ["calculater"]}, "no tool 'calculater' (did you mean 'calculator'?)"),
        ({"use": ["none.py:f"]}, "there is no file none.py"),
        ({"use": ["search"]}, "needs `tools.corpus`"),
        ({"use": ["search"], "corpus": "none.jsonl"}, "there is no such file"),
        ({"use": ["calculator"], "corpus": "x.jsonl"}, "`tools.corpus` has no effect"),
        ({"use": ["calculator"], "call_format": "hermse"}, "(did you mean 'hermes'?)"),
        ({"mcp": {"a": "no-such-program --x"}}, "there is no program 'no-such-program'"),
        ({"mcp": {"a": "'"}}, "there is no program ''"),
    ],
)
def test_tools_that_cannot_work(tools, message):
    found = problems(tools)
    assert len(found) == 1
    assert message in found[0]


def test_generate_functions_and_tools_go_together():
    assert problems({"use": ["calculator"]}) == []
    assert "'tool_lop' is unknown (did you mean 'tool_loop'?)" in problems(generate="tool_lop")[0]
    assert "there is no file none.py" in problems(generate="none.py:f")[0]
    assert "no effect without" in problems({"use": ["calculator"]}, generate="")[0]
    assert "needs `data.apply_chat_template`" in problems({"use": ["python"]}, data={"apply_chat_template": False})[0]
    sets = {"eval": {"sets": {"a": {"path": "a.jsonl", "custom_generate": "tool_loop"}}}}
    assert problems({"use": ["python"]}, generate="", **sets) == []
