"""Token in, token out: what was said stays as it was said, and sessions become samples."""

import asyncio

import pytest

from slimecli.agents.chat import Ask, Chat
from slimecli.agents.conversation import Sessions
from slimecli.agents.tool_calls import tool_format
from slimecli.data_tools.rewards import load_reward
from slimecli.errors import SlimeError
from slimecli.recipe_reward import RewardSection
from slimecli.rollout.versions import mask_before
from slimecli.types import Sample
from tests.agents.scripted import CALL, WEATHER, scripted

USER = {"role": "user", "content": "Weather in Oslo?"}


def talk(chat, messages, **more):
    return asyncio.run(chat.answer(chat.prepare(Ask(messages=messages, **more))))[0]


def test_a_tool_loop_is_one_clean_sample_whatever_the_template_would_write(tmp_path):
    own, text = scripted(tmp_path, "Looking. " + CALL, "It rains.")
    chat = Chat(text, Sessions(text))
    first = talk(chat, [USER], tools=[WEATHER])
    assert first.reason == "tool_calls" and first.calls[0].arguments == {"city": "Oslo"} and first.content == "Looking."
    result = {"role": "tool", "content": "rain"}
    talk(chat, [USER, first.message, result], tools=[WEATHER])
    said = own.asked[0]["input_ids"] + own.codec.ids("Looking. " + CALL) + [2]
    assert own.asked[1]["input_ids"][: len(said)] == said
    rest = own.codec.decode([own.asked[1]["input_ids"][len(said) :]], False)[0]
    assert rest == "\n<|im_start|>user\n<tool_response>rain</tool_response><|im_end|>\n<|im_start|>assistant\n"
    (session,) = chat.sessions
    (sample,) = chat.sessions.end(session.id, reward=1.0)
    assert sample.tokens == own.asked[1]["input_ids"] + own.codec.ids("It rains.") + [2]
    trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert trained == [*own.codec.ids("Looking. " + CALL), 2, *own.codec.ids("It rains."), 2]
    assert sample.weight_versions == ["3"] and sample.reward == 1.0 and sample.session_id == session.id
    assert len(chat.sessions) == 0 and text.counts["rendered"] == 1
    sample.check()


def test_thinking_that_the_template_drops_stays_in_the_tokens(tmp_path):
    own, text = scripted(tmp_path, "<think>hm</think>\n\n4", "5")
    chat = Chat(text, Sessions(text))
    first = talk(chat, [USER], think=True)
    assert (first.thinking, first.content) == ("hm", "4")
    talk(chat, [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 2+3?"}], think=True)
    assert "<think>hm</think>" in own.codec.decode([own.asked[1]["input_ids"]], False)[0]
    (session,) = chat.sessions
    assert len(session.samples(lambda ids: "")) == 1


def test_an_answer_cut_by_its_budget_is_ended_as_the_template_does(tmp_path):
    own, text = scripted(tmp_path, ("It ra", {"type": "length", "length": 5}), "ins.")
    chat = Chat(text, Sessions(text))
    first = talk(chat, [USER])
    talk(chat, [USER, first.message, {"role": "user", "content": "go on"}])
    shown = own.codec.decode([own.asked[1]["input_ids"]], False)[0]
    assert "assistant\nIt ra<|im_end|>\n<|im_start|>user\ngo on" in shown
    (session,) = chat.sessions
    (sample,) = session.samples(lambda ids: "")
    assert sample.loss_mask[: len(own.codec.ids("It ra"))] == [1] * len(own.codec.ids("It ra"))
    assert sample.loss_mask[len(own.codec.ids("It ra"))] == 0, "the end token is the template's, not the model's"


def test_a_history_told_otherwise_is_a_sample_of_its_own(tmp_path):
    _, text = scripted(tmp_path, "4", "5", "6")
    chat = Chat(text, Sessions(text))
    session = chat.sessions.open("mine", base=Sample(index=7))
    first = talk(chat, [USER], session="mine")
    talk(chat, [USER, {"role": "assistant", "content": "rewritten"}, USER], session="mine")
    talk(chat, [USER, first.message, USER], session="mine")
    samples = session.samples(lambda ids: "")
    assert len(samples) == 2 and {s.rollout_id for s in samples} == {7}
    assert sum(s.effective_response_length for s in samples) == sum(len(t.output_ids) for t in session.turns)


def test_sessions_are_found_by_what_is_said(tmp_path):
    _, text = scripted(tmp_path, "one", "two", "three")
    chat = Chat(text, Sessions(text))
    a = talk(chat, [USER])
    talk(chat, [{"role": "user", "content": "other"}])
    assert len(chat.sessions) == 2
    talk(chat, [USER, a.message, {"role": "user", "content": "more"}])
    assert sorted(len(s.turns) for s in chat.sessions) == [1, 2]


def test_a_sessions_sampling_overrides_the_callers_and_seeds_move_on(tmp_path):
    own, text = scripted(tmp_path, "a", "b")
    chat = Chat(text, Sessions(text), sampling={"top_p": 1.0})
    chat.sessions.open("s").sampling = {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 9}
    for _ in range(2):
        talk(chat, [USER], session="s", params={"temperature": 0.0, "top_p": 0.5, "max_new_tokens": 1000})
    params = [p["sampling_params"] for p in own.asked]
    assert all((p["temperature"], p["top_p"], p["max_new_tokens"]) == (0.7, 1.0, 9) for p in params)
    assert params[0]["sampling_seed"] == 5 and params[1]["sampling_seed"] not in (5, None)
    assert {p["routing_key"] for p in own.asked} == {"s"}


def test_a_sample_knows_which_tokens_were_said_by_which_weights(tmp_path):
    own, text = scripted(tmp_path, "abcdef")
    whole = own.generate

    async def changed_under_way(payload):
        reply = await whole(payload)
        spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": len(reply["output_ids"])}]
        reply["meta_info"]["weight_versions"] = spans
        return reply

    own.generate = changed_under_way
    chat = Chat(text, Sessions(text))
    talk(chat, [USER], session="s")
    (sample,) = chat.sessions.end("s", reward=1.0)
    assert sample.version_spans == [["3", 0, 2], ["4", 2, sample.response_length]]
    assert sample.weight_versions == ["3", "4"]
    mask_before(sample, 4)
    assert sample.loss_mask == [0, 0] + [1] * (sample.response_length - 2)


def test_requests_at_the_same_time_have_seeds_of_their_own(tmp_path):
    own, text = scripted(tmp_path, "a", "b")
    chat = Chat(text, Sessions(text))
    chat.sessions.open("s").sampling = {"sampling_seed": 5}
    pending = [chat.prepare(Ask(messages=[USER], session="s")) for _ in range(2)]

    async def both():
        await asyncio.gather(*(chat.answer(p) for p in pending))

    asyncio.run(both())
    seeds = [p["sampling_params"]["sampling_seed"] for p in own.asked]
    assert seeds[0] == 5 and seeds[1] != 5, "two tries of one question are two answers"


def test_what_a_user_says_earns_no_reward(tmp_path):
    _, text = scripted(tmp_path, "No idea.", "I do not know.")
    chat = Chat(text, Sessions(text))
    first = talk(chat, [USER], session="s")
    talk(chat, [USER, first.message, {"role": "user", "content": "Is it \\boxed{4}?"}], session="s")
    (sample,) = chat.sessions.end("s", label="4")
    assert "\\boxed{4}" in sample.response
    reward = load_reward(RewardSection(type="math"))
    assert asyncio.run(reward.each(None, [sample])) == [0.0]


def test_what_the_trainer_could_not_compute_is_not_the_agents_to_ask_for(tmp_path):
    own, text = scripted(tmp_path, "a", "b")
    asked = {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_new_tokens": 1}
    asked |= {"logit_bias": {"5": 9.0}, "max_new_tokens": 5}
    chat = Chat(text, Sessions(text))
    talk(chat, [USER], session="s", params=asked)
    sent = own.asked[0]["sampling_params"]
    assert [sent[name] for name in asked] == [0.0, 0.0, 1.0, 0, None, 5]
    talk(Chat(text), [USER], params=asked)
    assert {name: own.asked[1]["sampling_params"][name] for name in asked} == asked, "nothing is learnt from this one"


@pytest.mark.parametrize(("family", "length"), [("qwen3", 29), ("mistral", 9)])
def test_calls_have_the_same_names_in_equal_runs_and_others_otherwise(tmp_path, family, length):
    calls = ('[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "weather", "arguments": {}}]', CALL + CALL)
    found = []
    for question in ("Oslo?", "Oslo?", "Bergen?"):
        _, text = scripted(tmp_path, calls[family != "mistral"], family=family)
        text.tools = tool_format(family)
        found.append(talk(Chat(text), [{"role": "user", "content": question}], tools=[WEATHER]).ids)
    assert found[0] == found[1] and len({*found[0], *found[2]}) == 4 and {len(i) for i in found[0]} == {length}


def test_requests_without_an_answer_leave_no_session(tmp_path):
    own, text = scripted(tmp_path, "a", max_context=60)
    sessions = Sessions(text)
    chat = Chat(text, sessions)
    sessions.keep(sessions.open("opened"))

    async def lost(payload):
        raise SlimeError("the engine died")

    whole, own.generate = own.generate, lost
    for name in ("", "named", "opened"):
        with pytest.raises(SlimeError, match="died"):
            talk(chat, [USER], session=name)
        with pytest.raises(SlimeError, match="the context 60"):
            talk(chat, [{"role": "user", "content": "x" * 80}], session=name)
    assert [s.id for s in sessions] == ["opened"]
    own.generate = whole
    talk(chat, [USER], session="spoken")
    own.generate = lost
    with pytest.raises(SlimeError, match="died"):
        talk(chat, [USER], session="spoken")
    assert [s.id for s in sessions] == ["opened", "spoken"]


def test_idle_sessions_are_those_nobody_waits_for(tmp_path):
    _, text = scripted(tmp_path, "a")
    sessions = Sessions(text)
    sessions.open("old").used -= 100
    busy = sessions.open("busy")
    busy.used -= 100
    busy.busy = 1
    sessions.open("new")
    assert sessions.idle(50) == ["old"]
