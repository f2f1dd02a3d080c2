"""Tool calls in the formats that chat templates teach."""

import time

import pytest

from slimecli.errors import SlimeError
from slimecli.tools.parsers import PARSERS, Parsed, ToolCall, load_parser, split_reasoning

ADD = ToolCall(name="add", arguments={"a": 1, "b": [2, 3]})
ECHO = ToolCall(name="echo", arguments={"text": "two\nlines"})

WRITTEN = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>\n'
        '<tool_call>{"name": "echo", "arguments": "{\\"text\\": \\"two\\\\nlines\\"}"}</tool_call>'
    ),
    "qwen3_coder": (
        "Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n[2, 3]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call><function=echo><parameter=text>\ntwo\nlines\n</parameter></function>"
        "</tool_call>"
    ),
    "glm": (
        "Let me see.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>[2, 3]</arg_value>\n</tool_call><tool_call>echo\n<arg_key>text</arg_key>"
        "<arg_value>two\nlines</arg_value></tool_call>"
    ),
    "deepseek": (
        "Let me see.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, 3]}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{"text": "two\\nlines"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": [2, 3]}<|tool_call_end|><|tool_call_begin|>functions.echo:1<|tool_call_argument_begin|>'
        '{"text": "two\\nlines"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "mistral": (
        'Let me see.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}]'
        '[TOOL_CALLS]echo[ARGS]{"text": "two\\nlines"}'
    ),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_two_calls_after_some_words(form):
    parsed = load_parser(form)(WRITTEN[form])
    assert parsed == Parsed(text="Let me see.", calls=(ADD, ECHO))


def test_llama_answers_are_calls_or_words():
    parser = load_parser("llama3")
    assert parser('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, 3]}}').calls == (ADD,)
    two = (
        '{"name": "add", "parameters": {"a": 1, "b": [2, 3]}}; {"name": "echo", "parameters": {"text": "two\\nlines"}}'
    )
    assert parser(two) == Parsed(text="", calls=(ADD, ECHO))
    assert parser("It is {3}.") == Parsed(text="It is {3}.")
    assert "cannot be read" in parser('{"name": "add", "parameters": ').errors[0]


@pytest.mark.parametrize("form", PARSERS)
def test_words_alone_are_no_call(form):
    assert load_parser(form)(" The answer is 3. ") == Parsed(text="The answer is 3.")


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("hermes", "<tool_call>{'name': add}</tool_call>", "property name"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no JSON object with a "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments are no JSON object"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "no <function=NAME>"),
        ("glm", '<tool_call>{"name": "add"}</tool_call>', "name of a tool"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "tool▁sep"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_end|>", "argument_begin"),
        ("mistral", "[TOOL_CALLS] nothing", "Expecting value"),
    ],
)
def test_what_cannot_be_read_is_told_and_the_rest_kept(form, text, reason):
    parsed = load_parser(form)(text)
    assert parsed.calls == ()
    assert len(parsed.errors) == 1
    assert reason in parsed.errors[0]


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + NESTED),
        ("llama3", '{"name": ' + NESTED),
        ("mistral", "[TOOL_CALLS]" + NESTED),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>" + NESTED),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>" + NESTED),
    ],
)
def test_brackets_without_end_are_told(form, text):
    parsed = load_parser(form)(text)
    assert parsed.calls == () and "nested too deeply" in parsed.errors[0]
    as_text = load_parser("glm")(f"<tool_call>f<arg_key>a</arg_key><arg_value>{NESTED}</arg_value></tool_call>")
    assert as_text.calls[0].arguments == {"a": NESTED}


@pytest.mark.parametrize(
    ("form", "begin", "repeated"),
    [
        ("glm", "<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
        ("glm", "<tool_call>f", "<arg_key>"),
        ("glm", "<tool_call>f", "<arg_key></arg_key>"),
        ("qwen3_coder", "<tool_call><function=f>", "<parameter="),
        ("qwen3_coder", "<tool_call>", "<function="),
    ],
)
def test_a_mark_repeated_without_end_is_read_in_no_time(form, begin, repeated):
    """A model that has lost itself must not hold up the event loop of all others."""
    start = time.process_time()
    load_parser(form)(begin + repeated * 10_000)
    assert time.process_time() - start < 1.0


def test_glm_values_may_hold_the_marks_themselves():
    text = "<tool_call>f<arg_key>a</arg_key> <arg_value>x<arg_key>y</arg_value><arg_key>b</arg_key><arg_value>2"
    assert load_parser("glm")(text).calls[0].arguments == {"a": "x<arg_key>y"}


def test_a_good_call_survives_a_bad_one_and_an_open_end():
    text = '<tool_call>nonsense</tool_call><tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}'
    parsed = load_parser("hermes")(text)
    assert parsed.calls == (ADD,)
    assert len(parsed.errors) == 1


def test_the_format_follows_from_the_chat_template():
    assert load_parser("auto", "... <tool_call>{{ x }}</tool_call>") is load_parser("hermes")
    assert load_parser("auto", "<tool_call>\n<function=") is load_parser("qwen3_coder")
    assert load_parser("auto", "<tool_call>{{ n }}<arg_key>") is load_parser("glm")
    assert load_parser("auto", "<|python_tag|>") is load_parser("llama3")
    assert load_parser("auto", "nothing") is load_parser("hermes")
    with pytest.raises(SlimeError, match="hermse.*did you mean.*hermes"):
        load_parser("hermse")


def test_thinking_is_split_off():
    assert split_reasoning("<think>a</think>b") == ("a", "b")
    assert split_reasoning("a</think>b") == ("a", "b")  # the template had opened it
    assert split_reasoning("b") == ("", "b")
    assert split_reasoning("<think>a") == ("a", "")
    assert split_reasoning("x<think>a</think>y<think>b</think>c")[1] == "c"
