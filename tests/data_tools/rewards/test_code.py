import asyncio
import json
import time

import pytest

from slimecli.data_tools.rewards import code, load_reward
from slimecli.data_tools.rewards.code import extract_code, read_tests, same_output, same_value
from slimecli.errors import DataError, SlimeError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
FUNCTION = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nand an example:\n```\nadd(1, 2)\n```"


def scored(response, tests, label=None, settings=None, **metadata):
    section = RewardSection.model_validate(
        {"type": "code", "code": {"wall_s": 2.0, "memory_mb": 256}} | (settings or {})
    )
    sample = Sample(index=3, response=response, label=label, metadata={"tests": tests, **metadata})
    return asyncio.run(load_reward(section)(None, sample))


@pytest.mark.parametrize(
    ("response", "tests", "expected"),
    [
        (ADD, SUMS, 1.0),
        (ADD.replace("+ b", "- b"), SUMS, 0.0),
        (ADD, [SUMS[0], {"stdin": "1 1", "stdout": "3"}], 0.0),
        ("print(3)", SUMS[:1], 1.0),
        ("", SUMS, 0.0),
        ("I cannot do that", SUMS, 0.0),
        ("<think>" + ADD + "</think>no", SUMS, 0.0),
        (FUNCTION, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], 1.0),
        (FUNCTION, ["assert add(1, 2) == 4"], 0.0),
        (FUNCTION, ["import math\nassert math.isclose(add(.1, .2), .3)"], 1.0),
        (FUNCTION, [{"call": "add(1, 2)", "expected": 3}, {"call": "add([1], (2,))", "expected": 3}], 0.0),
        (FUNCTION, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]}, 1.0),
        (ADD, {"inputs": ["1 2"], "outputs": ["3"]}, 1.0),
        ("```python\nprint(3)\nimport sys\nsys.exit(1)\n```", SUMS[:1], 0.0),
        ("```python\nprint('ok')\nexit(0)\n```", ["assert add(1, 2) == 3"], 0.0),
        ("```python\nimport os\nprint('all tests passed')\nos._exit(0)\n```", ["assert True"], 0.0),
        ("```python\ndef add(a, b):\n    raise SystemExit(0)\n```", ["assert add(1, 2) == 3"], 0.0),
        ("```python\nimport sys\ndef add(a, b): sys.exit(0)\n```", [{"call": "add(1, 2)", "expected": 3}], 0.0),
        (
            "```python\nclass Y(int):\n  __eq__ = lambda a, b: True\ndef add(a, b): return Y()\n```",
            [{"call": "add(1, 2)", "expected": 3}], 0.0,
        ),
        ("```python\nwhile True: pass\n```", SUMS[:1], 0.0),
        ("```python\nx = [0] * 10**9\nprint(3)\n```", SUMS[:1], 0.0),
        ("```python\nwhile True: print('3' * 1000)\n```", SUMS[:1], 0.0),
        ("```python\nimport os\nwhile True: os.fork()\n```", SUMS[:1], 0.0),
    ],
)  # fmt: skip
def test_programs(response, tests, expected):
    assert scored(response, tests) == expected


def test_partial_counts_the_tests_that_pass():
    tests = [*SUMS, {"input": "1 1", "output": "3"}, "assert False"]
    assert scored(ADD, tests[:3], partial=True) == pytest.approx(2 / 3)
    assert scored(
        FUNCTION, ["assert add(1, 1) == 2", "assert add(1, 1) == 3", "assert add(2, 1) == 3"], partial=True
    ) == (pytest.approx(2 / 3))


def test_the_label_may_hold_the_tests():
    assert scored(ADD, None, label=json.dumps(SUMS)) == 1.0


@pytest.mark.parametrize("tests", [None, [], "no json", [{"input": "1"}], {"inputs": [1], "outputs": []}, 5])
def test_rows_without_usable_tests_fail_and_are_not_zero(tests):
    with pytest.raises(DataError, match="sample 3: .*tests"):
        scored(ADD, tests)


def test_a_slow_row_is_a_failure_when_its_tests_do_not_fit_in_the_deadline():
    sleeper = "```python\nimport time\ntime.sleep(0.4)\nprint(1)\n```"
    start = time.monotonic()
    with pytest.raises(SlimeError, match="longer than"):
        scored(sleeper, [{"input": "", "output": "1"}] * 20, settings={"timeout_s": 1.0})
    assert time.monotonic() - start < 3


def test_isolation_can_be_required(monkeypatch):
    from slimecli.data_tools import sandbox

    monkeypatch.setattr(sandbox, "isolation", lambda: dict.fromkeys(sandbox.PARTS, False))
    with pytest.raises(SlimeError, match="cannot be cut off from: network"):
        scored(ADD, SUMS, settings={"code": {"isolation": "required"}})


def test_several_programs_of_a_group_run_one_by_one(monkeypatch):
    reward = load_reward(RewardSection(type="exact"))
    samples = [
        Sample(index=0, response=ADD, metadata={"tests": SUMS, "rm_type": "code"}),
        Sample(index=1, response="7", label="7"),
        Sample(index=2, response="\\boxed{print(3)}", metadata={"tests": SUMS[:1], "rm_type": "boxed_code"}),
        Sample(index=3, response=ADD, metadata={"rm_type": "code"}),
    ]
    scores = asyncio.run(reward.each(None, samples))
    assert scores[:3] == [1.0, 1.0, 1.0] and isinstance(scores[3], DataError)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```\n```text\nb\n```", "a"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("```python\na = '''```'''\n", "a = '''```'''\n"),
        ("plain", "plain"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b"),
        ("```python\ndef f():\n    x\n\n    ```\nafter", "def f():\n    x\n"),
    ],
)
def test_extract_code(response, program):
    assert extract_code(response) == program


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (10**20, 10**20 + 1, False),
        ([1, [2]], (1, [2]), True),
        ([1], [1, 2], False),
        ({"1": [0.5]}, {1: [0.5]}, True),
        ({"1": 1}, {"2": 1}, False),
        (None, 0, False),
        ("1", 1, False),
    ],
)
def test_same_value(given, wanted, same):
    assert same_value(given, wanted) is same


def test_same_output_forgives_white_space_at_line_ends_only():
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a\n\nb", "a\nb") and not same_output("a b", "ab") and not same_output("", "a")


def test_tests_come_in_one_shape():
    assert read_tests({"inputs": [["1", "2"]], "outputs": [3]}) == [{"input": "1\n2", "output": "3"}]
    assert read_tests({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[2]]}) == [
        {"kind": "call", "code": "f(1, 'a')", "expected": 2}
    ]
    assert "expected" not in code._asked(read_tests([{"call": "f()", "expected": 9}])[0])
