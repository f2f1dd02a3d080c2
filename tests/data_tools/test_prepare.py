import json
import tracemalloc

import pytest

from slimecli import files
from slimecli.data_tools.conversations import load_conversations
from slimecli.data_tools.demonstrations import load_demonstration
from slimecli.data_tools.formats import read_rows
from slimecli.data_tools.prepare import prepare
from slimecli.data_tools.prompts import load_prompts
from slimecli.errors import DataError, UsageError
from slimecli.recipe_sections import DataSection, SftSection

ADDITION = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "question": "{expression} =",
    "extract": "last_number",
}


def generated(**changes):
    fields = {
        "source": "reasoning_gym:basic_arithmetic",
        "source_args": ADDITION,
        "count": 300,
        "holdout": 20,
        "demonstrations": "column_addition",
    }
    return DataSection(**(fields | changes))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, *content):
    path.write_text("".join(c if isinstance(c, str) else json.dumps(c) + "\n" for c in content))
    return str(path)


def test_generated_data(tmp_path):
    report = prepare(generated(), SftSection(), tmp_path, seed=3)
    train, holdout, sft = (rows(tmp_path / f"{n}.jsonl") for n in ("train", "holdout", "sft"))
    assert report.kept == {"train": 300, "holdout": 20, "sft": 300} and not report.length_checked
    assert len({r["prompt"] for r in train + holdout}) == 320
    for row in train:
        a, b = row["prompt"].removesuffix(" =").split(" + ")
        assert int(row["label"]) == int(a) + int(b)
    answers = [r["messages"][-1]["content"] for r in sft]
    assert [r["messages"][0]["content"] for r in sft] == [r["prompt"] for r in train]
    assert all(a.endswith(r["label"]) for a, r in zip(answers, train, strict=True))
    assert 0.5 < sum(a.isdigit() for a in answers) / 300 < 0.7


def test_same_seed_same_bytes_other_seed_other_rows(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        prepare(generated(), SftSection(), tmp_path / name, seed=seed)
    assert files.sha256(tmp_path / "a") == files.sha256(tmp_path / "b") != files.sha256(tmp_path / "c")


def test_columns_keep_the_names_of_the_recipe(tmp_path):
    section = generated(input_key="question", label_key="answer", messages_key="chat", metadata_key="extra")
    prepare(section, SftSection(), tmp_path, seed=0)
    assert set(rows(tmp_path / "train.jsonl")[0]) == {"question", "answer", "extra"}
    assert set(rows(tmp_path / "sft.jsonl")[0]) == {"chat"}


def test_exhausted_generator_is_an_error(tmp_path):
    narrow = ADDITION | {"min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="gave 121 usable rows in 6400 draws, but 320 are wanted.*6279 duplicate"):
        prepare(generated(source_args=narrow), SftSection(), tmp_path, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "reasoning_jym:x"}, "did you mean 'reasoning_gym'"),
        ({"source": "reasoning_gym:basic_aritmetic"}, "did you mean 'basic_arithmetic'"),
        ({"source_args": ADDITION | {"min_term": 2}}, "did you mean 'min_terms'"),
        ({"source_args": ADDITION | {"operators": ["?"]}}, "unsupported operator"),
        ({"source_args": ADDITION | {"question": "{expresion}"}}, "does not fit"),
        ({"count": 0}, "without data.count"),
        ({"demonstrations": "column_adition"}, "did you mean 'column_addition'"),
        ({"demonstration_args": {"drect": 1}}, "did you mean 'direct'"),
    ],
)
def test_wrong_names(tmp_path, changes, message):
    with pytest.raises(UsageError) as caught:
        prepare(generated(**changes), SftSection(), tmp_path, seed=0)
    assert message in caught.value.what and caught.value.fix


def test_file_with_every_kind_of_dropped_row(tmp_path, tokenizer):
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": "1 + 1 =", "label": 2},
        {"prompt": "1 + 1  =", "label": 2},
        {"prompt": [{"role": "user", "content": "1 + 1 ="}], "label": 2},
        {"prompt": "  ", "label": 2},
        {"prompt": "2 + 2 =", "label": None},
        {"prompt": "9" * 90, "label": "x"},
        {"prompt": "evaluated", "label": "x"},
        "\n",
        {"prompt": "3 + 3 =", "label": 6},
    )
    exclude = write(tmp_path / "eval.jsonl", {"prompt": "evaluated", "label": "x"})
    section = DataSection(train=path, max_prompt_tokens=40)
    report = prepare(section, SftSection(), tmp_path, seed=0, tokenizer=tokenizer, exclude=[(exclude, section)])
    assert report.to_dict()["dropped"] == {
        "blank line": 1,
        "duplicate": 2,
        "empty prompt": 1,
        "missing label": 1,
        "overlap with evaluation": 1,
        "too long": 1,
    }
    assert [r["prompt"] for r in rows(tmp_path / "train.jsonl")] == ["1 + 1 =", "3 + 3 ="]
    assert report.length_checked and report.kept == {"train": 2}


def test_broken_rows_stop_or_are_counted(tmp_path):
    path = write(tmp_path / "in.jsonl", {"prompt": "a", "label": "x"}, "{oops\n", {"prompt": 7, "label": "x"})
    with pytest.raises(DataError, match=r"in\.jsonl:2:2"):
        prepare(DataSection(train=path), SftSection(), tmp_path, seed=0)
    report = prepare(DataSection(train=path, skip_broken=True), SftSection(), tmp_path, seed=0)
    assert report.dropped["broken"] == 2 and report.kept == {"train": 1}
    assert "in.jsonl:2:2" in report.examples[0] and "in.jsonl:3: " in report.examples[1], "the line, not the row"


def test_wrong_column_is_never_skipped(tmp_path):
    path = write(tmp_path / "in.jsonl", {"question": "a", "label": "x"})
    with pytest.raises(DataError, match="the columns are: label, question"):
        prepare(DataSection(train=path, skip_broken=True), SftSection(), tmp_path, seed=0)


def test_holdout_of_a_file_and_sft_overlap(tmp_path):
    path = write(tmp_path / "in.jsonl", *({"prompt": f"q{i}", "label": "x"} for i in range(20)))
    chats = ([{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "x"}] for i in range(20))
    sft = write(tmp_path / "chat.jsonl", *({"messages": c} for c in chats))
    report = prepare(DataSection(train=path, holdout=5), SftSection(data=sft), tmp_path, seed=0)
    held = {r["prompt"] for r in rows(tmp_path / "holdout.jsonl")}
    taught = {r["messages"][0]["content"] for r in rows(tmp_path / "sft.jsonl")}
    assert report.kept == {"train": 15, "holdout": 5, "sft": 15} and not held & taught
    assert report.dropped["overlap with holdout"] == 5
    with pytest.raises(DataError, match="cannot give 20 held-out"):
        prepare(DataSection(train=path, holdout=20), SftSection(), tmp_path, seed=0)
    with pytest.raises(DataError, match=r"15 usable rows, but data\.count = 16"):
        prepare(DataSection(train=path, holdout=5, count=16), SftSection(), tmp_path, seed=0)


def test_conversations_in_the_training_file(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "in.jsonl", {"messages": chat}, {"messages": chat}, {"messages": chat[:1]})
    report = prepare(DataSection(train=path), SftSection(), tmp_path, seed=0)
    assert report.kept == {"sft": 1} and report.dropped == {"duplicate": 1, "no assistant message": 1}


def test_nothing_left(tmp_path):
    path = write(tmp_path / "in.jsonl", {"prompt": "", "label": "x"})
    with pytest.raises(DataError, match="no row is left: 1 empty prompt"):
        prepare(DataSection(train=path), SftSection(), tmp_path, seed=0)
    with pytest.raises(UsageError, match="names no data"):
        prepare(DataSection(), SftSection(), tmp_path, seed=0)


class Never:
    """An rng that never chooses the direct answer."""

    def random(self):
        return 1.0


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("47 + 85", "7+5=12 4+8+1=13 =132"),
        ("100 + 99", "0+9=9 0+9=9 1+0=1 =199"),
        ("7 + 5", "7+5=12 =12"),
        ("95 + 5", "5+5=10 9+0+1=10 =100"),
    ],
)
def test_column_addition(expression, steps):
    entry = {"question": expression, "metadata": {"expression": expression}}
    row = {"label": str(sum(map(int, expression.split(" + ")))), "metadata": {"reasoning_gym": {"entry": entry}}}
    assert load_demonstration("column_addition", {"direct": 0.6})(row, Never()) == steps


def test_column_addition_refuses_other_tasks():
    entry = {"question": "2 * 3", "metadata": {"expression": "2 * 3"}}
    row = {"label": "6", "metadata": {"reasoning_gym": {"entry": entry}}}
    with pytest.raises(DataError, match="column_addition cannot show"):
        load_demonstration("column_addition", {})(row, Never())


def test_reversal_task(tmp_path):
    args = {"min_word_len": 3, "max_word_len": 5, "question": "{word} backward", "extract": "last_word"}
    section = generated(source="reasoning_gym:spell_backward", source_args=args, demonstrations="reverse_steps")
    prepare(section, SftSection(), tmp_path, seed=0)
    steps = [r["messages"] for r in rows(tmp_path / "sft.jsonl") if " " in r["messages"][1]["content"]]
    word = steps[0][0]["content"].removesuffix(" backward")
    assert steps[0][1]["content"] == " ".join([*reversed(word), word[::-1]]) and len(steps) > 60


@pytest.mark.parametrize("chat", [True, False])
def test_demonstrations_are_asked_as_the_rollout_asks(tmp_path, tokenizer, chat):
    changes = {"system_prompt": "brief", "prompt_template": "Solve: {prompt} now", "apply_chat_template": chat}
    section = generated(demonstrations="direct", count=20, holdout=2, **changes)
    prepare(section, SftSection(), tmp_path, seed=0)
    asked = [p.token_ids for p in load_prompts(str(tmp_path / "train.jsonl"), section, tokenizer)]
    taught = load_conversations(str(tmp_path / "sft.jsonl"), section, tokenizer)
    assert [tuple(s.tokens[: s.prompt_length]) for s in taught] == asked and len(asked) == 20


def conversation(question, answer="46"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_answers_to_held_out_prompts_are_no_demonstrations(tmp_path):
    """Rows with a prompt and a conversation: what is held out is held out of both."""
    rows = [{"prompt": f"{i} + 1 =", "label": "x", "messages": conversation(f"{i} + 1 =")} for i in range(20)]
    section = DataSection(train=write(tmp_path / "a.jsonl", *rows), holdout=5)
    report = prepare(section, SftSection(steps=1), tmp_path, seed=0)
    assert report.kept == {"train": 15, "holdout": 5, "sft": 15} and report.dropped["overlap with holdout"] == 5
    held = {row["prompt"] for row in read_rows(str(tmp_path / "holdout.jsonl"))}
    assert not held & {row["messages"][0]["content"] for row in read_rows(str(tmp_path / "sft.jsonl"))}


def test_conversations_are_checked_when_they_are_prepared(tmp_path, tokenizer):
    rows = [
        {"messages": conversation("1")},
        {"messages": conversation("2", "4" * 60)},
        {"messages": [{**m, "step_loss_mask": 0} for m in conversation("3")]},
        {"messages": conversation("evaluated", "other")},
    ]
    exclude = [(write(tmp_path / "eval.jsonl", {"prompt": "evaluated", "label": "x"}), DataSection())]
    section = DataSection(train=write(tmp_path / "a.jsonl", *rows))
    sft = SftSection(steps=1, max_tokens=40)
    report = prepare(section, sft, tmp_path, seed=0, tokenizer=tokenizer, exclude=exclude)
    assert report.kept == {"sft": 1}
    assert report.dropped == {"conversation too long": 1, "no token to learn": 1, "overlap with evaluation": 1}
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"a\.jsonl:1: cannot tell from the chat template"):
        prepare(section, sft, tmp_path, seed=0, tokenizer=tokenizer)


def test_of_a_file_larger_than_memory_only_a_hash_of_each_prompt_is_held(tmp_path):
    rows = 1500
    with (tmp_path / "long.jsonl").open("w") as handle:
        for i in range(rows):
            said = [{"role": "user", "content": f"{i} " + "q " * 800}, {"role": "assistant", "content": "a" * 800}]
            handle.write(json.dumps({"prompt": f"{i} " + "p " * 800, "label": str(i), "messages": said}) + "\n")
    size = (tmp_path / "long.jsonl").stat().st_size
    tracemalloc.start()
    report = prepare(DataSection(train=str(tmp_path / "long.jsonl"), holdout=5), SftSection(), tmp_path, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.kept == {"train": rows - 5, "holdout": 5, "sft": rows}
    assert peak < size / 8, f"{peak} bytes held of {size}"
