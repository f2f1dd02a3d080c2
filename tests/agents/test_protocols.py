"""OpenAI's and Anthropic's endpoints as their clients see them."""

import asyncio
import json

import pytest

from slimecli.agents.server import AgentServer
from slimecli.agents.text_engine import embedded
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.types import Sample
from tests.agents.scripted import CALL, WEATHER, http, scripted
from tests.models import tiny_model

USER = {"role": "user", "content": "Weather?"}
CLAUDE_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture
def serve(tmp_path):
    opened = []

    def start(*lines, **more):
        own, text = scripted(tmp_path, *lines, **more)
        opened.append(AgentServer(text))
        opened[-1].sessions.strict = False
        return own, opened[-1]

    yield start
    for server in opened:
        server.close()


def openai(server, body, key="k"):
    return http(server.url + "/v1/chat/completions", {"model": "m", **body}, {"Authorization": f"Bearer {key}"})


def claude(server, body, key="k"):
    return http(server.url + "/v1/messages", {"model": "m", "max_tokens": 50, **body}, {"x-api-key": key})


def test_openai_tools_round_trip_in_the_session_of_the_key(serve):
    own, server = serve("Hm. " + CALL, "Rain.")
    status, first, headers = openai(server, {"messages": [USER], "tools": [WEATHER], "logprobs": True})
    choice = first["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert status == 200 and choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hm."
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"} and call["id"].startswith("call_")
    assert len(choice["logprobs"]["content"]) == first["usage"]["completion_tokens"] > 0
    assert headers["x-session-id"] == "k"
    turn = [USER, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    _, second, _ = openai(server, {"messages": turn, "tools": [WEATHER]})
    assert second["choices"][0]["message"]["content"] == "Rain." and second["choices"][0]["finish_reason"] == "stop"
    said = own.asked[0]["input_ids"] + own.codec.ids("Hm. " + CALL) + [2]
    assert own.asked[1]["input_ids"][: len(said)] == said
    assert http(server.url + "/sessions/k")[1]["turns"] == 2
    status, ended, _ = http(server.url + "/sessions/k/end", {"reward": 0.5})
    assert ended["samples"] == 1 and http(server.url + "/sessions/k")[0] == 404


def test_openai_streams_text_then_calls(serve):
    _, server = serve("One, " + CALL)
    body = {"messages": [USER], "tools": [WEATHER], "stream": True, "stream_options": {"include_usage": True}}
    _, events, headers = openai(server, body)
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == "One,"
    calls = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert len(calls) == 1 and calls[0][0]["index"] == 0 and calls[0][0]["function"]["name"] == "weather"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens"] > 0 and headers["x-session-id"] == "k"


def test_openai_tool_choice_and_single_calls(serve):
    own, server = serve(' {"city": "Bergen"}}\n</tool_call>', CALL + "\n" + CALL, "no tools")
    forced = {"type": "function", "function": {"name": "weather"}}
    _, answer, _ = openai(server, {"messages": [USER], "tools": [WEATHER], "tool_choice": forced})
    assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bergen"}
    assert own.codec.decode([own.asked[0]["input_ids"]], False)[0].endswith('{"name": "weather", "arguments":')
    openai(server, {"messages": [USER], "tools": [WEATHER], "parallel_tool_calls": False}, key="b")
    assert own.asked[1]["sampling_params"]["stop"] == ["</tool_call>"]
    openai(server, {"messages": [USER], "tools": [WEATHER], "tool_choice": "none"}, key="c")
    assert "weather" not in own.codec.decode([own.asked[2]["input_ids"]], False)[0]
    status, wrong, _ = openai(server, {"messages": [USER], "tools": [WEATHER], "tool_choice": "required_"})
    assert status == 400 and "required_" in wrong["error"]["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "functions": [1]}, "'functions'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "no function name"),
    ],
)
def test_openai_refuses_what_it_does_not_know_by_name(serve, body, reason):
    _, server = serve()
    status, answer, _ = openai(server, body)
    assert status == 400 and reason in answer["error"]["message"]


def test_a_call_that_cannot_be_read_is_text_and_counted(serve):
    _, server = serve("<tool_call>{oops</tool_call>")
    _, answer, _ = openai(server, {"messages": [USER], "tools": [WEATHER]})
    message = answer["choices"][0]["message"]
    assert message["content"] == "<tool_call>{oops</tool_call>" and message["tool_calls"] is None
    assert http(server.url + "/sessions/k")[1]["ill_formed"] == 1 and server.engine.counts["ill_formed"] == 1
    assert http(server.url + "/sessions")[1]["counts"] == {"ill_formed": 1, "rendered": 1, "tool_calls": 0}


def test_anthropic_tools_thinking_and_counting(serve):
    own, server = serve("<think>\nwhere\n</think>\n\nLooking. " + CALL, "Rain.")
    _, first, headers = claude(server, {"system": "Be brief.", "messages": [USER], "tools": [CLAUDE_TOOL]})
    assert [b["type"] for b in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][0]["thinking"] == "where" and first["content"][1]["text"] == "Looking."
    use = first["content"][2]
    assert (use["name"], use["input"], first["stop_reason"]) == ("weather", {"city": "Oslo"}, "tool_use")
    assert first["usage"]["output_tokens"] > 0 and headers["x-session-id"] == "k"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "rain"}]}
    turn = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    _, second, _ = claude(server, {"system": "Be brief.", "messages": turn, "tools": [CLAUDE_TOOL]})
    assert second["content"] == [{"type": "text", "text": "Rain."}] and second["stop_reason"] == "end_turn"
    assert "<think>\nwhere\n</think>" in own.codec.decode([own.asked[1]["input_ids"]], False)[0]
    _, counted, _ = http(server.url + "/v1/messages/count_tokens", {"messages": [USER], "tools": [CLAUDE_TOOL]})
    text = own.codec.render([USER], tools=[WEATHER])
    assert counted["input_tokens"] == len(own.codec.ids(text))


def test_anthropic_streams_its_events(serve):
    _, server = serve("<think>hm</think>So. " + CALL)
    _, events, _ = claude(server, {"messages": [USER], "tools": [CLAUDE_TOOL], "stream": True})
    kinds = [e["type"] for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas) == "So."
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"city": "Oslo"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_feedback_and_errors_of_sessions(serve):
    _, server = serve("a", "b")
    openai(server, {"messages": [USER]}, key="s1")
    assert http(server.url + "/feedback", {"session_id": "s1"})[0] == 400
    assert http(server.url + "/feedback", {"session_id": "s1", "reward": "good"})[0] == 400
    assert http(server.url + "/feedback", {"session_id": "nobody", "reward": 1})[0] == 404
    assert http(server.url + "/feedback", {"session_id": "s1", "reward": 1})[1]["samples"] == 1
    http(server.url + "/sessions", {"id": "s2", "group": "g", "label": "4", "metadata": {"task": 1}})
    assert [s["session_id"] for s in http(server.url + "/sessions")[1]["sessions"]] == ["s2"]
    assert http(server.url + "/sessions", {"idd": "x"})[0] == 400
    http(server.url + "/sessions", {"id": "s2", "metadata": {"more": 2}})
    session = server.sessions.get("s2")
    assert (session.group, session.base.label, session.base.metadata) == ("g", "4", {"task": 1, "more": 2})


def test_a_session_may_have_a_number_for_its_name(serve):
    _, server = serve("a")
    _, _, headers = http(server.url + "/v1/chat/completions", {"messages": [USER], "session_id": 0})
    assert headers["x-session-id"] == "0"
    assert http(server.url + "/feedback", {"session_id": 0, "reward": 1})[1]["samples"] == 1


def test_an_agent_that_was_given_up_is_turned_away(serve):
    _, server = serve("a", "b")
    server.sessions.strict = True

    async def work():
        async with server.session(Sample(index=1)) as session:
            assert (await asyncio.to_thread(openai, server, {"messages": [USER]}, session.api_key))[0] == 200
        return session.api_key

    key = asyncio.run(work())
    status, answer, _ = openai(server, {"messages": [USER]}, key)
    assert status == 404 and "no open session" in answer["error"]["message"] and len(server.sessions) == 0


def test_the_keys_of_agents_are_nobodys_business(serve):
    """They name sessions: who is told one could speak in it, or end it."""
    _, server = serve("a")
    server.sessions.strict = True

    async def work():
        async with server.session(Sample(index=1)) as session:
            await asyncio.to_thread(openai, server, {"messages": [USER]}, session.api_key)
            for path, body in (
                ("/sessions", None),
                (f"/sessions/{session.api_key}", None),
                (f"/sessions/{session.api_key}/end", {}),
                ("/feedback", {"session_id": session.api_key, "reward": 1.0}),
                ("/sessions", {"id": "mine"}),
            ):
                status, told, _ = await asyncio.to_thread(http, server.url + path, body)
                assert status == 404 and session.api_key not in json.dumps(told)
            return await session.samples()

    assert len(asyncio.run(work())) == 1 and len(server.sessions) == 0


def test_equal_runs_of_an_agent_give_equal_samples(serve):
    async def work(server):
        async with server.session(Sample(index=7, group_index=3)) as session:
            await asyncio.to_thread(openai, server, {"messages": [USER]}, session.api_key)
            return await session.samples()

    (first,), (second,) = (asyncio.run(work(serve("Hm. " + CALL)[1])) for _ in range(2))
    assert first.to_json() == second.to_json() and first.session_id == "3-7"


def test_a_full_context_is_told(serve):
    _, server = serve("a", max_context=20)
    status, answer, _ = openai(server, {"messages": [{"role": "user", "content": "long " * 40}]})
    assert status == 400 and "the context 20" in answer["error"]["message"]


def test_over_the_embedded_engine_tokens_are_those_of_the_engine(tmp_path):
    engine = EmbeddedEngine(tiny_model(tmp_path), slots=4, max_context=400)
    server = AgentServer(embedded(engine), max_tokens=400)

    async def work():
        sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True}
        async with server.session(Sample(index=4, label="x"), sampling) as session:
            messages = [USER]
            for _ in range(3):
                headers = {"Authorization": f"Bearer {session.api_key}"}
                body = {"messages": messages, "stream": True}
                url = f"{session.base_url}/chat/completions"
                _, events, _ = await asyncio.to_thread(http, url, body, headers)
                said = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
            return await session.samples()

    try:
        (sample,) = asyncio.run(work())
        params = {"max_new_tokens": 1, "temperature": 1.0}
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        again = asyncio.run(engine.generate(payload))["meta_info"]["input_token_logprobs"]
    finally:
        server.close()
        asyncio.run(engine.close())
    assert sample.effective_response_length == 36 and sample.rollout_id == 4 and sample.label == "x"
    assert sample.metadata["turns"] == 3 and sample.weight_versions == ["0"]
    scored = [p for p, _, _ in again][sample.prompt_length :]
    for mask, ours, theirs in zip(sample.loss_mask, sample.rollout_log_probs, scored, strict=True):
        assert not mask or abs(ours - theirs) < 1e-4
