import json

import pytest

from slimecli.data_tools.formats import read_lines
from slimecli.data_tools.prompts import load_prompts, render_rows
from slimecli.data_tools.workers import CHUNK
from slimecli.errors import DataError
from slimecli.recipe_sections import DataSection


def data(tmp_path, *rows):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_text_is_rendered_as_a_user_turn(tmp_path, tokenizer):
    path = data(tmp_path, {"prompt": "12 + 34 =", "label": 46, "metadata": {"k": 1}})
    (prompt,) = load_prompts(path, DataSection(), tokenizer)
    assert prompt.text == "<|im_start|>user\n12 + 34 =<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert len(prompt.token_ids) == 15
    assert prompt.label == "46" and prompt.metadata == {"k": 1}


def test_system_prompt_and_tools(tmp_path, tokenizer):
    tools = [{"name": "add"}]
    path = data(
        tmp_path,
        {"prompt": "hi", "label": "x", "tools": json.dumps(tools)},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}], "label": "x"},
    )
    first, second = load_prompts(path, DataSection(system_prompt="be brief"), tokenizer)
    assert first.text.startswith("<|im_start|>system\nbe brief\n\nTools:\n")
    assert first.metadata["tools"] == tools
    assert second.text.startswith("<|im_start|>system\nown<|im_end|>\n") and "be brief" not in second.text


def test_verbatim_without_template(tmp_path, tokenizer):
    path = data(tmp_path, {"prompt": "12 +", "label": "x"})
    (prompt,) = load_prompts(path, DataSection(apply_chat_template=False), tokenizer)
    assert prompt.text == "12 +"


def test_wrong_column_lists_what_is_there(tmp_path, tokenizer):
    path = data(tmp_path, {"promt": "a", "label": "x"})
    with pytest.raises(DataError) as caught:
        load_prompts(path, DataSection(), tokenizer)
    assert "no column 'prompt' (did you mean 'promt'?); the columns are: label, promt" in caught.value.what
    assert "--set data.input_key=" in caught.value.fix


def test_missing_label_column_is_an_error_unless_none_is_wanted(tmp_path, tokenizer):
    path = data(tmp_path, {"prompt": "a", "answer": "x"})
    with pytest.raises(DataError, match="no column 'label'"):
        load_prompts(path, DataSection(), tokenizer)
    assert load_prompts(path, DataSection(label_key=""), tokenizer)[0].label is None


def test_json_lines_from_elsewhere_are_named_by_line(tokenizer):
    def render(*lines):
        return render_rows(read_lines(lines, "<stdin>"), DataSection(), tokenizer)

    good, bad = b'{"prompt": "1", "label": 2}\n', b'{"promt": "1"}\n'
    assert [p.label for p in render(good, b"\n", good)] == ["2", "2"]
    with pytest.raises(DataError, match=r"^<stdin>:3: no column 'prompt'"):
        render(good, b"\n", bad)
    with pytest.raises(DataError, match=r"^<stdin>:2:2: not valid JSON"):
        render(good, b"{oops\n")
    with pytest.raises(DataError, match="<stdin> has no rows"):
        render(b"\n")


def test_too_long_prompts_are_counted(tmp_path, tokenizer):
    path = data(tmp_path, {"prompt": "1", "label": "x"}, {"prompt": "1" * 50, "label": "x"})
    with pytest.raises(
        DataError, match=r"1 of 2 prompts are longer than 20 tokens, the first: .*/p.jsonl:2 \(58 tokens\)"
    ):
        load_prompts(path, DataSection(max_prompt_tokens=20), tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 5, "label": "x"}, "holds a int"),
        ({"prompt": [{"role": "robot", "content": "a"}], "label": "x"}, "role 'robot'"),
        ({"prompt": [{"content": "a"}], "label": "x"}, "has no role"),
        ({"prompt": "a", "label": "x", "metadata": "m"}, "metadata"),
        ({"prompt": "a", "label": "x", "tools": "{"}, "not JSON"),
    ],
)
def test_wrong_values(tmp_path, tokenizer, row, message):
    with pytest.raises(DataError) as caught:
        load_prompts(data(tmp_path, row), DataSection(), tokenizer)
    assert message in caught.value.what and ".jsonl:1" in caught.value.what


def test_workers_render_what_one_process_renders(tmp_path, tokenizer):
    rows = [{"prompt": f"{i} +", "label": i, "metadata": {"n": i}} for i in range(CHUNK * 2 + 3)]
    path = data(tmp_path, *rows)
    assert load_prompts(path, DataSection(workers=2), tokenizer) == load_prompts(path, DataSection(), tokenizer)


def test_a_row_that_a_worker_cannot_render_is_named(tmp_path, tokenizer):
    rows = [{"prompt": f"{i} +", "label": i} for i in range(CHUNK + 5)]
    del rows[CHUNK + 1]["prompt"]
    path = data(tmp_path, *rows)
    with pytest.raises(DataError) as alone:
        load_prompts(path, DataSection(), tokenizer)
    with pytest.raises(DataError) as shared:
        load_prompts(path, DataSection(workers=2), tokenizer)
    assert (shared.value.what, shared.value.fix) == (alone.value.what, alone.value.fix)
    assert f":{CHUNK + 2}" in alone.value.what
