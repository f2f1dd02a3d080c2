"""The tools that come with slime, and those made of functions."""

import asyncio
import json
import math
import time

import pytest

from slimecli.errors import DataError, SlimeError
from slimecli.recipe_tools import ToolsSection
from slimecli.tools.base import ToolError
from slimecli.tools.builtin import calculate
from slimecli.tools.parsers import ToolCall, load_parser
from slimecli.tools.search import Passage, SearchIndex, open_index
from slimecli.tools.toolbox import Toolbox


def call(box, tool, /, **arguments):
    return asyncio.run(box.call(ToolCall(name=tool, arguments=arguments)))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(17 - 4) / 2", "6.5"),
        ("6 / 3", "2"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("10 % 4", "2"),
        ("sqrt(2) * sqrt(2)", "2.0000000000000004"),
        ("max(1, 2.5)", "2.5"),
        ("2 ** 200", str(2**200)),
        ("round(10 / 3, 2)", "3.33"),
        ("round(2.5) + round(-12345, -2)", "-12298"),
    ],
)
def test_calculator(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "zero"),
        ("__import__('os')", "no function __import__"),
        ("(1).real", "only numbers"),
        ("9 ** 9 ** 9", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e308 ** 2", "(?i)result too large|out of range"),
        ("2 +", "not an expression"),
        ("(" * 400 + "1" + ")" * 400, "longer than"),
        ("'a' * 9", "only numbers"),
        ("round(7, -999999999)", "at most 500 digits"),
    ],
)
def test_calculator_refuses(expression, reason):
    with pytest.raises(ToolError, match=reason):
        calculate(expression)


def test_python_prints_or_shows_its_last_value():
    box = Toolbox(ToolsSection(use=["python"], python_isolation="limits", timeout_s=10))
    assert call(box, "python", code="print('a')\nx = 2; x + 1  # three").text == "a\n3"
    assert call(box, "python", code="x = 'ä'; (1,\n 2), x").text == "((1, 2), 'ä')"
    assert "no output" in call(box, "python", code="x = 1").text
    broken = call(box, "python", code="print(1)\n1 / 0")
    assert broken.failed
    assert broken.text.startswith("Error: 1\n")
    assert "ZeroDivisionError" in broken.text


def test_python_shows_a_program_that_python_cannot_write_down_again_as_it_is():
    box = Toolbox(ToolsSection(use=["python"]))
    done = call(box, "python", code="print(3)\n" + "-" * 2000 + "1")
    assert (done.text, done.failed) == ("3", False)


def test_python_is_held_to_time_and_memory():
    box = Toolbox(ToolsSection(use=["python"], python_isolation="limits", timeout_s=1.0, python_memory_mb=256))
    begin = time.monotonic()
    late = call(box, "python", code="print('begun', flush=True)\nwhile True: pass")
    assert late.failed
    assert late.text == "Error: begun\nlonger than 1 s"
    assert time.monotonic() - begin < 6
    assert "MemoryError" in call(box, "python", code="x = bytearray(1 << 30)").text


def test_search_ranks_by_bm25(tmp_path):
    index = SearchIndex(
        [
            Passage("The capital of France is Paris."),
            Passage("Paris Paris Paris is a name.", "Paris Hilton"),
            Passage("Lyon is a city in France."),
            Passage("Nothing of interest."),
        ]
    )
    assert [p.text[:3] for p in index.search("capital France", 2)] == ["The", "Lyo"]
    assert index.search("paris", 1)[0].title == "Paris Hilton"
    assert index.search("zebra", 3) == []
    # by hand: N = 4, df(lyon) = 1, tf = 1, |d| = 6, mean |d| = (6 + 8 + 6 + 3) / 4
    assert index.search("lyon zebra", 4) == [index.passages[2]]
    norm = 1.2 * (0.25 + 0.75 * 6 / 5.75)
    assert index.scores("lyon zebra").tolist() == pytest.approx([0, 0, math.log(1 + 3.5 / 1.5) * 2.2 / (1 + norm), 0])
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "A", "text": "alpha beta"}\n{"contents": "\\"B\\"\\ngamma"}\n')
    box = Toolbox(ToolsSection(use=["search"], corpus=str(path), search_results=2))
    assert call(box, "search", query="Gamma?").text == "[1] B\ngamma"
    assert call(box, "search", query="nowhere").text == "nothing found"


def test_search_needs_a_corpus_with_texts(tmp_path):
    with pytest.raises(SlimeError, match="set tools.corpus"):
        Toolbox(ToolsSection(use=["search"]))
    path = tmp_path / "c.jsonl"
    path.write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"row 1: no column `text`"):
        open_index(str(path))


OWN = '''
import time

def look_up(name: str, exact: bool = False, limit: int | None = None):
    """Looks a name up.

    name: whom to look for
    """
    if name == "nobody":
        raise KeyError(name)
    return {"name": name, "exact": exact}

async def slow(seconds: float) -> str:
    """Takes its time."""
    import asyncio
    await asyncio.sleep(seconds)
    return "done"

def silent(x):
    return x
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_own_functions_become_tools(own):
    box = Toolbox(ToolsSection(use=[f"{own}:look_up", f"{own}:slow"], timeout_s=0.3))
    schema = box.schemas()[0]
    assert schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a name up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "whom to look for"},
                    "exact": {"type": "boolean"},
                    "limit": {"type": ["integer", "null"]},
                },
                "required": ["name"],
            },
        },
    }
    assert json.loads(call(box, "look_up", name="x").text) == {"name": "x", "exact": False}
    assert call(box, "look_up", name="nobody").text == "Error: KeyError: 'nobody'"
    assert call(box, "look_up", name=3).text == "Error: look_up: name must be string, not 3"
    assert call(box, "look_up", name="x", exact=1).text == "Error: look_up: exact must be boolean, not 1"
    assert call(box, "look_up", name="x", other=1).text.startswith("Error: look_up has no argument other")
    assert call(box, "slow", seconds=0.01).text == "done"
    late = call(box, "slow", seconds=5)
    assert (late.text, late.failed) == ("Error: no result within 0.3 s", True)


def test_only_offered_tools_can_be_called(own):
    box = Toolbox(ToolsSection(use=["calculator", f"{own}:slow"]))
    blocked = asyncio.run(box.call(ToolCall(name="slow", arguments={"seconds": 0}), offered=["calculator"]))
    assert blocked.text == "Error: there is no tool 'slow'; tools: calculator"
    with pytest.raises(SlimeError, match="offers a tool 'calcluator'.*did you mean.*calculator"):
        box.schemas(["calcluator"])


def test_a_tool_needs_words_and_a_known_name(own):
    with pytest.raises(SlimeError, match="no docstring"):
        Toolbox(ToolsSection(use=[f"{own}:silent"]))
    with pytest.raises(SlimeError, match="no tool 'serach'.*did you mean.*search"):
        Toolbox(ToolsSection(use=["serach"]))


def test_calls_without_types_are_read_by_the_schema(own):
    box = Toolbox(ToolsSection(use=[f"{own}:look_up"]))
    inner = "<function=look_up><parameter=name>10117</parameter><parameter=exact>true</parameter></function>"
    (parsed,) = load_parser("qwen3_coder")(f"<tool_call>{inner}</tool_call>").calls
    assert json.loads(asyncio.run(box.call(parsed)).text) == {"name": "10117", "exact": True}
