"""Conversations whose token ids only grow, with chat templates that keep earlier turns and such that do not."""

import pytest

from slimecli.rollout.turns import Conversation
from tests.models import tiny_tokenizer

ASK = [{"role": "user", "content": "What is 10 + 10"}]
TOOL = [{"role": "tool", "name": "x", "content": "20"}]
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRITES_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ (m['content'] or '') | trim }}"
    "{% for c in m.get('tool_calls', []) %} CALL {{ c['function']['name'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def begin(tokenizer, template=None):
    if template:
        tokenizer.chat_template = template
    return Conversation(tokenizer, ASK, [], [tokenizer.eos_token_id])


def test_the_new_part_is_tokenized_and_nothing_else(tokenizer):
    talk = begin(tokenizer)
    prompt = list(talk.ids)
    assert prompt == ids(tokenizer, "<|im_start|>user\nWhat is 10 + 10<|im_end|>\n<|im_start|>assistant\n")
    # the answer "10" in two tokens, which the tokenizer would write as one
    odd = [*ids(tokenizer, "1"), *ids(tokenizer, "0"), tokenizer.eos_token_id]
    assert odd[:2] != ids(tokenizer, "10")
    assert talk.say(odd) == "10"
    assert talk.hear(TOOL)
    assert talk.ids == prompt + odd + ids(tokenizer, "\n<|im_start|>tool\n20<|im_end|>\n<|im_start|>assistant\n")
    second = ids(tokenizer, "The answer<|im_end|>")
    held = list(talk.ids)
    talk.say(second)
    assert talk.hear(TOOL)
    assert talk.ids[: len(held) + len(second)] == held + second


def test_a_turn_that_was_cut_gets_its_end_from_the_template(tokenizer):
    talk = begin(tokenizer)
    prompt, said = list(talk.ids), ids(tokenizer, "The")
    talk.say(said)
    assert talk.hear(TOOL)
    end = ids(tokenizer, "<|im_end|>\n<|im_start|>tool\n20<|im_end|>\n<|im_start|>assistant\n")
    assert talk.ids == prompt + said + end


def test_bytes_that_are_no_character_are_kept(tokenizer):
    talk = begin(tokenizer)
    prompt = list(talk.ids)
    half = ids(tokenizer, "ä")[:1]
    assert talk.say([*half, tokenizer.eos_token_id]) == "\ufffd"
    assert talk.hear(TOOL)
    assert talk.ids[: len(prompt) + 2] == [*prompt, *half, tokenizer.eos_token_id]


def test_a_template_that_drops_thinking_breaks_the_prefix(tokenizer):
    before = tokenizer.chat_template
    talk = begin(tokenizer, DROPS_THINKING)
    try:
        talk.say(ids(tokenizer, "<think>10</think>The<|im_end|>"))
        assert not talk.hear(TOOL)
        assert "think" not in talk.text
        assert talk.ids == ids(tokenizer, talk.text)
        talk.say(ids(tokenizer, "20<|im_end|>"))  # nothing to drop: it goes on from there
        assert talk.hear(TOOL)
    finally:
        tokenizer.chat_template = before


def test_another_end_than_the_templates_breaks_the_prefix(tokenizer):
    talk = Conversation(tokenizer, ASK, [], [0, 2])
    talk.say([*ids(tokenizer, "The"), 0])  # <|endoftext|>, where the template has <|im_end|>
    assert not talk.hear(TOOL)


def test_a_template_that_writes_calls_itself_is_given_them(tokenizer):
    before = tokenizer.chat_template
    calls = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {}}}]
    talk = begin(tokenizer, WRITES_CALLS)
    try:
        # as said, the template trims the space at the end away; with the calls taken out it writes the same
        talk.say(ids(tokenizer, " CALL add<|im_end|>"))
        assert talk.hear(TOOL, calls, "")
        assert talk.messages[1]["tool_calls"] == calls
    finally:
        tokenizer.chat_template = before
