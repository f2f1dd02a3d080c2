import pytest

from slimecli.data_tools.rewards.answers import dapo, form, gpqa
from slimecli.errors import DataError

RIGHT, WRONG = {"score": 1.0, "acc": 1.0}, {"score": -1.0, "acc": 0.0}


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("so\nAnswer: 34", "34", RIGHT),
        ("Answer: 5\nno: answer : $\\boxed{34}$.", "34", RIGHT),
        ("Answer: 1,234", "1234", RIGHT),
        ("Answer: x = 34", "34", RIGHT),
        ("Answer: 34 degrees", "34", RIGHT),
        ("Answer: \\text{34}", "34.0", RIGHT),
        ("Answer: −3", "-3", RIGHT),
        ("Answer: 35", "34", WRONG),
        ("\\boxed{34}", "34", WRONG),
        ("Answer: 34" + " and so on" * 40, "34", WRONG),
        ("Answer: 34\n" + "x" * 289, "34", RIGHT),
        ("Answer: 34\n" + "x" * 290, "34", WRONG),  # its first letter is the 301st from the end
        ("Answer:\n34", "34", RIGHT),
        ("Answer: \\frac{34}{1}", "34", WRONG),
        ("", "34", WRONG),
    ],
)
def test_dapo(response, label, expected):
    assert dapo(response, label, {}) == expected


@pytest.mark.parametrize("label", ["one half", "0.5", "", None, "inf"])
def test_dapo_wants_integer_labels(label):
    with pytest.raises(DataError, match="integers|needs a label"):
        dapo("Answer: 1", label, {})


CHOICES = {"choices": ["red shift", "blue shift", "no shift", "both"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("The answer is B", "B", {}, 1.0),
        ("answer: (b)", "B", {}, 1.0),
        ("**Answer: C**", "C", {}, 1.0),
        ("Option A is the correct one. Final answer: D", "D", {}, 1.0),
        ("C is correct", "C", {}, 1.0),
        ("\\boxed{D}", "D", {}, 1.0),
        ("I think A, no: B", "B", {}, 1.0),
        ("The answer is B", "A", {}, 0.0),
        ("<think>answer is A</think>The answer is B", "B", {}, 1.0),
        ("<think>answer is A</think>", "A", {}, 0.0),
        ("A cat sat.", "A", {}, 0.0),
        ("It must be A", "A", {}, 1.0),
        ("the answer is blue shift", "blue shift", CHOICES, 1.0),
        ("the answer is E", "B", CHOICES, 0.0),
        ("The answer is B", "1", CHOICES, 1.0),
        ("The answer is B", "Blue-shift!", CHOICES, 1.0),
        ("The answer is K", None, {"valid_letters": ["K", "L"], "correct_letter": "k"}, 1.0),
        ("", "B", {}, 0.0),
        ("redshifted", "red shift", CHOICES, 0.0),
        ("B7~", "B", {}, 0.0),
        ("what is the answer? I don't know", "I", {}, 0.0),
    ],
)
def test_gpqa(response, label, metadata, expected):
    assert gpqa(response, label, metadata) == expected


def test_gpqa_without_an_answer_to_compare():
    with pytest.raises(DataError, match="needs a label"):
        gpqa("The answer is B", None, {})


@pytest.mark.parametrize(
    ("response", "metadata", "expected"),
    [
        ("<think>a</think>\\boxed{1}", {}, 1.0),
        ("\\boxed{1}", {}, 1.0),
        ("<think>\\boxed{1}</think>", {}, 0.0),
        ("<think>a\\boxed{1}", {}, 0.0),
        ("so <think>a</think>\\boxed{1}", {}, 0.0),
        ("<think>a</think><think>b</think>\\boxed{1}", {}, 0.0),
        ("\\boxed{1}\\boxed{2}", {}, 0.0),
        ("\\boxed{1", {}, 0.0),
        ("", {}, 0.0),
        ("<answer>1</answer>", {"extract": "answer_tag"}, 1.0),
        ("<answer>1</answer><answer>1</answer>", {"extract": "answer_tag"}, 0.0),
        ("it is 5", {"extract": "last_number"}, 1.0),
        ("A: 1\nB: 2", {"format": r"A: \d\nB: \d"}, 1.0),
        ("A: 1\nB: 2 end", {"format": r"A: \d\nB: \d"}, 0.0),
    ],
)
def test_format(response, metadata, expected):
    assert form(response, None, metadata) == expected


def test_format_names_a_broken_pattern():
    with pytest.raises(DataError, match="not a regular expression"):
        form("x", None, {"format": "("})
