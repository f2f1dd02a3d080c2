"""Tool calls in whole and in growing answers, per family."""

import pytest

from slimecli.agents.tool_calls import FAMILIES, FORMATS, begin, forced, parse, schemas_of, tool_format, visible

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "7", "days": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "weather", "parameters": {"city": "7", "days": 2}}',
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "7", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "7", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "7", "days": 2}}]',
}
FAMILY = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3_moe",
    "llama3": "llama",
    "deepseek": "deepseek_v3",
    "kimi": "kimi_k2",
}


def form(name):
    template = "<function=" if name == "qwen3_coder" else ""
    return tool_format(FAMILY.get(name) or next(f for f, n in FAMILIES.items() if n == name), template)


@pytest.mark.parametrize("name", FORMATS)
def test_a_familys_own_form_is_read_and_typed_by_the_schema(name):
    how = form(name)
    said = "" if how.at_start else "Let me look.\n"
    found = parse(said + WRITTEN[name], how, SCHEMAS)
    assert [(c.name, c.arguments) for c in found.calls] == [("weather", {"city": "7", "days": 2})]
    assert found.content == said.strip() and not found.ill_formed


@pytest.mark.parametrize("name", FORMATS)
def test_growing_text_never_shows_what_becomes_a_call(name):
    how = form(name)
    said = "" if how.at_start else "Let me look."
    text = said + WRITTEN[name]
    shown = ""
    for end in range(1, len(text) + 1):
        now = visible(text[:end], how)
        assert now.startswith(shown), "what was shown is not taken back"
        shown = now
    assert shown == said


@pytest.mark.parametrize(
    "broken", ["<tool_call>\n{not json}\n</tool_call>", '<tool_call>{"arguments": {}}</tool_call>']
)
def test_what_cannot_be_read_stays_text_and_is_said_to_be_ill_formed(broken):
    found = parse("So: " + broken, form("hermes"), SCHEMAS)
    assert found.content == "So: " + broken and not found.calls and found.ill_formed
    assert not parse("no call at all", form("hermes"), SCHEMAS).ill_formed


def test_several_calls_and_a_tune_of_another_family():
    how = tool_format("llama", template="... <tool_call> ...")
    assert how.parser == "hermes", "a Hermes tune of Llama writes Hermes' calls"
    assert [c.arguments["city"] for c in parse(WRITTEN["hermes"] * 2, how, SCHEMAS).calls] == ["7", "7"]
    assert tool_format("some_new_family").parser == "hermes"


def test_forced_calls_begin_as_the_family_writes_them():
    assert forced(form("hermes"), "weather") == '<tool_call>\n{"name": "weather", "arguments":'
    assert forced(form("hermes"), "") == '<tool_call>\n{"name": "'
    for name in FORMATS:
        how = form(name)
        if how.opening:
            assert begin(forced(how, "weather"), how) == 0
            assert WRITTEN[name].replace(" ", "").startswith(forced(how, "weather").replace(" ", ""))


def test_schemas_of_openais_tools():
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"x": 1}}}, {"name": "b"}]
    assert schemas_of(tools) == {"a": {"x": 1}, "b": {}}
