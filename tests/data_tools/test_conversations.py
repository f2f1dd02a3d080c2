import json
import re

import pytest

from slimecli.data_tools.conversations import load_conversations, render_conversation
from slimecli.data_tools.prompts import load_prompts
from slimecli.errors import DataError
from slimecli.recipe_sections import DataSection

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "12 + 34 ="},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "sunny =46"},
]

QWEN_LIKE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- (m.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def trained(tokens, mask, tokenizer):
    """Runs of trained tokens as text."""
    runs, last = [], 0
    for token, bit in zip(tokens, mask, strict=True):
        if bit and not last:
            runs.append([])
        if bit:
            runs[-1].append(token)
        last = bit
    return [tokenizer.decode(r) for r in runs]


def unmarked(tokenizer):
    tokenizer.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tokenizer.chat_template)
    return tokenizer


@pytest.mark.parametrize("prepare", [lambda t: t, unmarked], ids=["markers", "offsets"])
def test_multi_turn_with_system_and_tools(tokenizer, prepare):
    tokenizer = prepare(tokenizer)
    tokens, mask = render_conversation(CHAT, tokenizer)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert tokens == whole
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert trained(tokens, mask, tokenizer) == ["46<|im_end|>", f"{call}<|im_end|>", "sunny =46<|im_end|>"]


def test_every_token_of_a_small_conversation(tokenizer):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "46"}]
    tokens, mask = render_conversation(chat, tokenizer)
    shown = [(tokenizer.decode([t]), m) for t, m in zip(tokens, mask, strict=True)]
    assert shown == [
        ("<|im_start|>", 0),
        ("user", 0),
        ("\n", 0),
        ("1", 0),
        ("<|im_end|>", 0),
        ("\n", 0),
        ("<|im_start|>", 0),
        ("assistant", 0),
        ("\n", 0),
        ("4", 1),
        ("6", 1),
        ("<|im_end|>", 1),
        ("\n", 0),
    ]


@pytest.mark.parametrize("prepare", [lambda t: t, unmarked], ids=["markers", "offsets"])
def test_step_loss_mask_leaves_a_turn_out(tokenizer, prepare):
    chat = [dict(m) for m in CHAT]
    chat[2]["step_loss_mask"] = 0
    tokenizer = prepare(tokenizer)
    tokens, mask = render_conversation(chat, tokenizer)
    assert len(trained(tokens, mask, tokenizer)) == 2 and "46<|im_end|>" not in trained(tokens, mask, tokenizer)
    assert tokens == render_conversation(CHAT, tokenizer)[0]


def test_template_that_writes_the_last_turn_differently(tokenizer):
    tokenizer.chat_template = QWEN_LIKE
    chat = [CHAT[1], CHAT[2], CHAT[3], CHAT[6]]
    tokens, mask = render_conversation(chat, tokenizer)
    assert trained(tokens, mask, tokenizer) == ["46<|im_end|>", "<think>\n\n</think>\n\nsunny =46<|im_end|>"]


def test_marker_inside_a_message_is_refused(tokenizer):
    chat = [{"role": "user", "content": "x<|im_start|>assistant\n"}, {"role": "assistant", "content": "46"}]
    with pytest.raises(DataError, match="marker"):
        render_conversation(chat, unmarked(tokenizer))


def test_conversation_without_answer(tokenizer):
    with pytest.raises(DataError, match="no assistant message"):
        render_conversation(CHAT[:2], tokenizer)


def test_load_gives_finished_samples(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    rows = [{"messages": CHAT[1:3]}, {"messages": CHAT}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    samples = load_conversations(str(path), DataSection(system_prompt="sys"), tokenizer)
    for i, sample in enumerate(samples):
        sample.check()
        assert (sample.index, sample.group_index, sample.reward, sample.status) == (i, i, 0.0, "completed")
        assert sample.mask[0] == 1 and sample.response_length == len(sample.mask)
    assert samples[0].response == "46<|im_end|>\n" and samples[0].mask == [1, 1, 1, 0]
    assert tokenizer.decode(samples[0].tokens).startswith("<|im_start|>system\nsys<|im_end|>")
    assert tokenizer.decode(samples[1].tokens).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_without_template(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": CHAT[1:3]}) + "\n")
    (sample,) = load_conversations(str(path), DataSection(apply_chat_template=False), tokenizer)
    assert tokenizer.decode(sample.tokens) == "12 + 34 =46<|im_end|>" and sample.response_length == 3
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(DataError, match=":1: without a chat template"):
        load_conversations(str(path), DataSection(apply_chat_template=False), tokenizer)


def test_sft_and_rl_see_the_same_prompt_tokens(tmp_path, tokenizer):
    section = DataSection(system_prompt="be brief")
    path = tmp_path / "both.jsonl"
    path.write_text(json.dumps({"prompt": CHAT[1]["content"], "label": "46", "messages": CHAT[1:3]}) + "\n")
    (sample,) = load_conversations(str(path), section, tokenizer)
    (prompt,) = load_prompts(str(path), section, tokenizer)
    assert tuple(sample.tokens[: sample.prompt_length]) == prompt.token_ids
