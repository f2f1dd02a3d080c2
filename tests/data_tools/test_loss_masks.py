"""Loss masks token by token, on templates built like those of the model families: what each writes around answers."""

import json
import shutil

import pytest

from slimecli import cli
from slimecli.data_tools.conversations import load_conversations
from slimecli.errors import DataError
from slimecli.recipe_sections import DataSection

CHATML = "{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
QWEN = (  # a default system prompt of its own
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe brief<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}" + CHATML + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (  # thoughts only after the last question, there even if empty; neighbouring tool outputs in one user turn
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set i = loop.index0 %}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if i > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ parts[-1].strip() + '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[i - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ '\\n' + m.content }}"
    "{% if loop.last or messages[i + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}" + CHATML + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + opened }}{% endif %}"
)
DISTILL = (  # turns end without a line break, thoughts are cut out, the generation prompt opens them
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[User]' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '[Assistant]' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[Assistant]<think>\\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen": QWEN,
    "qwen3": "{% set opened = '' %}" + QWEN3,
    "qwen3_5": "{% set opened = '<think>\\n' %}" + QWEN3,
    "distill_qwen": DISTILL,
}
THOUGHT = "<think>\n2+4=6\n</think>\n\n46"
CHAT = [
    {"role": "user", "content": "12 + 34 ="},
    {"role": "assistant", "content": THOUGHT},
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": "add"},
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": THOUGHT},
]


def masked(tmp_path, tokenizer, messages, **section):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (sample,) = load_conversations(str(path), DataSection(**section), tokenizer)
    mask = [0] * sample.prompt_length + sample.mask
    runs, last = [], 0
    for token, bit in zip(sample.tokens, mask, strict=True):
        if bit:
            runs = [*runs[:-1], [*runs[-1], token]] if last else [*runs, [token]]
        last = bit
    return tokenizer.decode(sample.tokens), [tokenizer.decode(run) for run in runs], sample


@pytest.mark.parametrize(
    ("kind", "messages", "expected"),
    [
        ("qwen", CHAT[2:4], ["add<|im_end|>"]),
        ("qwen", CHAT[:4], [f"{THOUGHT}<|im_end|>", "add<|im_end|>"]),
        ("qwen3", CHAT[:2], [f"{THOUGHT}<|im_end|>"]),
        ("qwen3", CHAT[2:4], ["<think>\n\n</think>\n\nadd<|im_end|>"]),
        ("qwen3", CHAT, ["46<|im_end|>", "<think>\n\n</think>\n\nadd<|im_end|>", f"{THOUGHT}<|im_end|>"]),
        ("qwen3_5", CHAT[:2], ["2+4=6\n</think>\n\n46<|im_end|>"]),
        ("qwen3_5", CHAT, ["46<|im_end|>", "\n</think>\n\nadd<|im_end|>", "2+4=6\n</think>\n\n46<|im_end|>"]),
        ("distill_qwen", CHAT[:2], ["2+4=6\n</think>\n\n46<|im_end|>"]),
        ("distill_qwen", CHAT[2:4], ["add<|im_end|>"]),
    ],
)
def test_what_is_trained_on(tmp_path, tokenizer, kind, messages, expected):
    tokenizer.chat_template = TEMPLATES[kind]
    text, runs, sample = masked(tmp_path, tokenizer, messages, loss_mask_type=kind)
    assert runs == expected
    if kind != "distill_qwen":
        assert text == tokenizer.apply_chat_template(messages, tokenize=False), "one rendering of the whole"
        assert masked(tmp_path, tokenizer, messages)[1] == expected, "found out without being told"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    if len(messages) == 2:  # what comes before the first trained token is the prompt of a rollout
        assert tokenizer.decode(sample.tokens[: sample.prompt_length]) == prompt


def test_every_token_of_a_thought(tmp_path, tokenizer):
    tokenizer.chat_template = TEMPLATES["distill_qwen"]
    _, _, sample = masked(tmp_path, tokenizer, CHAT[:2], loss_mask_type="answer")
    mask = [0] * sample.prompt_length + sample.mask
    shown = [(tokenizer.decode([t]), m) for t, m in zip(sample.tokens, mask, strict=True)]
    assert [text for text, bit in shown if bit] == [
        tokenizer.decode([t]) for t in sample.tokens[-sample.response_length :]
    ]
    assert shown[-1] == ("<|im_end|>", 1) and shown[-2] == ("6", 1)
    assert "".join(text for text, bit in shown if not bit) == "[User]12 + 34 =[Assistant]<think>\n"


def test_the_last_turn_alone(tmp_path, tokenizer):
    tokenizer.chat_template = TEMPLATES["qwen3"]
    text, runs, _ = masked(tmp_path, tokenizer, CHAT, loss_mask_type="last")
    assert runs == [f"{THOUGHT}<|im_end|>"] and text == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_templates_without_thoughts_are_found_out_about(tmp_path, tokenizer):
    """The header of a turn is what generation prompt and answer have in common, not the whole generation prompt."""
    tokenizer.chat_template = DISTILL
    chat = [CHAT[0], {"role": "assistant", "content": "46"}, CHAT[2], CHAT[3]]
    assert masked(tmp_path, tokenizer, chat)[1] == ["46<|im_end|>", "add<|im_end|>"]


def test_the_wrong_family_is_told(tmp_path, tokenizer):
    tokenizer.chat_template = DISTILL
    with pytest.raises(DataError, match=r":1: data\.loss_mask_type = 'qwen3', but the chat template"):
        masked(tmp_path, tokenizer, CHAT[:2], loss_mask_type="qwen3")
    with pytest.raises(DataError, match="does not end with an answer"):
        masked(tmp_path, tokenizer, CHAT[:3], loss_mask_type="answer")


def test_show_prints_masks_token_by_token(tmp_path, tokenizer_dir, capsys):
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir, model)
    (model / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    words = ["--input", path, "--out", tmp_path / "o", "--model", model, "--show", "1", "--set", "data.label_key="]
    assert cli.run(["prepare-data", *map(str, words)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) > 40 and {line[0].strip() for line in lines} == {"0", "1"}
    trained = "".join(json.loads(json.dumps(eval(line[2]))) for line in lines if line[0].strip() == "1")
    assert trained == f"46<|im_end|><think>\n\n</think>\n\nadd<|im_end|>{THOUGHT}<|im_end|>"
