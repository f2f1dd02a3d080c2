"""Requests that make no sense are refused by name: 400 and a reason, never a failure of the server."""

import asyncio
import json

import pytest

from slimecli.agents.server import AgentServer
from slimecli.agents.text_engine import HttpStream, remote
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError
from tests.agents.scripted import WEATHER, http, scripted
from tests.models import tiny_model

USER = {"role": "user", "content": "Weather?"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
OPENAI = [
    ({"stop": 5}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"top_logprobs": "a", "logprobs": True}, "top_logprobs"),
    ({"tools": "f"}, "tools"),
    ({"tools": [{}]}, "a tool is an object with a name"),
    ({"tools": [{"type": "function", "function": 5}]}, "a tool is an object with a name"),
    ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "'f': parameters must be a JSON schema"),
    ({"tools": [{"function": {"name": "f", "parameters": {"properties": [1]}}}]}, "'f': parameters"),
    ({"tools": [FUNCTION], "tool_choice": [1]}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"function": 5}}, "a tool is an object with a name"),
    ({"stream": "no"}, "stream"),
    ({"max_tokens": "abc"}, "max_tokens"),
    ({"stream_options": "x"}, "stream_options"),
    ({"response_format": "json"}, "response_format"),
    ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "messages is not the caller's to set"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "no text"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "no function name"),
    ({"session_id": "a\r\nX-Other: 1"}, "a session's name"),
    ({"session_id": "a" * 9000}, "a session's name"),
    ({"session_id": ["a"]}, "a session's name is text or a number"),
    ({"user": {"name": "a"}}, "a session's name is text or a number"),
]
ANTHROPIC = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "'f': input_schema"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"thinking": "x"}, "thinking"),
    ({"max_tokens": [5]}, "max_tokens"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "content"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    _, text = scripted(tmp_path_factory.mktemp("model"), max_context=20_000)
    own = AgentServer(text)
    own.sessions.strict = False
    yield own
    own.close()


@pytest.mark.parametrize(
    ("path", "wrong", "named"),
    [("chat/completions", *case) for case in OPENAI] + [("messages", *case) for case in ANTHROPIC],
)
def test_what_makes_no_sense_is_refused_by_name(server, path, wrong, named):
    status, told, _ = http(f"{server.url}/v1/{path}", {"messages": [USER], "max_tokens": 5, **wrong})
    assert status == 400 and named in told["error"]["message"], told


def test_a_caller_cannot_bring_a_template(server):
    """A template is a program: a caller's would run on the server, for as long as it likes."""
    ask = {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ messages }}"}}
    status, told, _ = http(f"{server.url}/v1/chat/completions", ask)
    assert status == 400 and "chat_template is not the caller's to set" in told["error"]["message"]


DEEP = json.loads("[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"a": DEEP}}}]},
        ),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "metadata": {"a": DEEP}}),
        ("/sessions", {"id": "deep", "metadata": {"a": DEEP}}),
        ("/feedback", {"session_id": "deep", "reward": 1, "metadata": {"a": DEEP}}),
    ],
)
def test_bodies_that_nothing_could_write_down_again_are_refused(server, path, body):
    status, told, _ = http(server.url + path, body)
    assert status == 400 and "more than 100 deep" in told["error"]["message"], told


@pytest.mark.parametrize("arguments", ["1" * 5000, "[" * 5000])
def test_arguments_that_are_no_json_are_text(server, arguments):
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    own, text = scripted_at(server)
    own.lines.append("ok")
    status, told, _ = http(f"{server.url}/v1/chat/completions", {"messages": [USER, said], "max_tokens": 5})
    assert status == 200, told
    assert arguments in text.codec.decode([own.asked[-1]["input_ids"]], False)[0]


def scripted_at(server):
    return server.engine.engine, server.engine


@pytest.mark.parametrize("wrong", [{"metadata": 5}, {"id": "a\nb"}, {"grp": "x"}])
def test_a_session_that_makes_no_sense_is_not_opened(server, wrong):
    before = len(server.sessions)
    assert http(f"{server.url}/sessions", wrong)[0] == 400 and len(server.sessions) == before


@pytest.mark.parametrize(
    ("limits", "budget"), [({"max_tokens": 0}, 0), ({"max_completion_tokens": 3, "max_tokens": 9}, 3)]
)
def test_a_budget_of_nothing_is_not_all_there_is(tmp_path, limits, budget):
    own, text = scripted(tmp_path, ("", {"type": "length", "length": budget}))
    other = AgentServer(text)
    other.sessions.strict = False
    try:
        assert http(f"{other.url}/v1/chat/completions", {"messages": [USER], "tools": [WEATHER], **limits})[0] == 200
    finally:
        other.close()
    assert own.asked[0]["sampling_params"]["max_new_tokens"] == budget


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A TextEngine over an engine behind HTTP, and the engine itself."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    own = EmbeddedEngine(folder, slots=2, max_context=64)
    url, stop = start_server_thread(own)
    client = HttpEngine(url, timeout_s=30)
    yield remote(client, folder, max_context=64, stream=HttpStream(client)), own
    asyncio.run(client.close())
    stop()


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_elsewhere_refuses_is_the_callers_to_mend(elsewhere, stream):
    """As 503, which clients try again by themselves, it would be refused again and again."""
    text, own = elsewhere
    wrong = {"input_ids": [5], "sampling_params": {"n": 0}}

    async def ask(payload):
        if stream:
            return [item async for item in text.stream(payload)]
        return await text.generate(payload)

    with pytest.raises(BadRequest, match=r"^sampling parameter n = 0 is outside \[1, 4096\]") as refused:
        asyncio.run(ask(wrong))
    assert "127.0.0.1" not in str(refused.value), "where the engine is, is nobody's business"
    asyncio.run(own.sleep(("kv_cache",)))
    with pytest.raises(SlimeError, match="cannot generate") as failed:
        asyncio.run(ask({"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}))
    assert not isinstance(failed.value, BadRequest), "the engine's state is not the caller's fault"
    asyncio.run(own.wake(("kv_cache",)))
