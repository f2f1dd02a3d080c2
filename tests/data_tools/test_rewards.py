import asyncio
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path

import pytest

from slimecli.data_tools.rewards import REWARDS, RewardTimeout, load_reward, solver
from slimecli.data_tools.rewards.extract import extract_boxed, last_number
from slimecli.data_tools.rewards.mathematics import equal
from slimecli.data_tools.rewards.threads import idle_threads
from slimecli.data_tools.sources import open_source
from slimecli.errors import DataError, SlimeError, UsageError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample


def score(response, label, kind="exact", metadata=None, **section):
    reward = load_reward(RewardSection(type=kind, **section))
    return asyncio.run(reward(None, Sample(index=7, response=response, label=label, metadata=metadata or {})))


@pytest.mark.parametrize(
    ("kind", "response", "label", "metadata", "expected"),
    [
        ("exact", " 81\n", "81", {}, 1.0),
        ("exact", "it is 81", "81", {}, 0.0),
        ("exact", "it is 81", "81", {"extract": "last_number"}, 1.0),
        ("exact", "1+0=1 =81", "81", {"extract": "last_number"}, 1.0),
        ("exact", "no number", "81", {"extract": "last_number"}, 0.0),
        ("exact", "<answer>a</answer><answer> b </answer>", "b", {"extract": "answer_tag"}, 1.0),
        ("boxed_exact", "so \\boxed{x{1}}", "x{1}", {}, 1.0),
        ("boxed_exact", "so x", "x", {}, 0.0),
        ("regex", "abc 12", r"\d{2}$", {}, 1.0),
        ("regex", "abc", r"\d", {}, 0.0),
        ("f1", "The cat!", "cat", {}, 1.0),
        ("f1", "a big cat", "small cat", {}, 0.5),
        ("f1", "yes it is", "yes", {}, 0.0),
        ("f1", "", "cat", {}, 0.0),
        ("math", "thus \\boxed{\\frac{1}{2}}", "0.5", {}, 1.0),
        ("math", "0.5", "0.5", {}, 0.0),
        ("math", "= 0.5", "0.5", {"extract": "last_number"}, 1.0),
        ("f1", "81", "81", {"rm_type": "exact"}, 1.0),
        ("exact", "\\boxed{2/4}", "1/2", {"rm_type": "math"}, 1.0),
    ],
)
def test_built_in(kind, response, label, metadata, expected):
    assert score(response, label, kind, metadata) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5-3", "3"), ("x = -3", "-3"), ("1,234.5 m", "1234.5"), ("none", None), ("(2)-1", "1"), ("7+4=11 =11", "11")],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


def test_boxed_needs_its_closing_brace():
    assert extract_boxed("\\boxed{1} then \\boxed{a{b}c}") == "a{b}c"
    assert extract_boxed("\\boxed{1} then \\boxed{2") is None


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("(1,2)", "(2,1)", False),
        ("[1,2)", "[1,2]", False),
        ("1,000", "1000", True),
        ("12\\text{ cm}", "12", True),
        ("\\dfrac{\\pi}{2}", "pi/2", True),
        ("x", "y", False),
        ("9**9**9**9", "1", False),
        ("__import__('os')", "1", False),
        ("(-1)^{0.5}", "1", False),
        ("1/0", "1/0.0", False),
        ("", "", False),
    ],
)
def test_math_equality(a, b, same):
    solver.equal("1", "1")  # started: its import takes seconds where a machine is busy
    start = time.perf_counter()
    assert equal(a, b) is same
    assert time.perf_counter() - start < solver.SECONDS


@pytest.mark.parametrize("task", ["basic_arithmetic", "spell_backward", "number_sorting", "gcd", "simple_equations"])
def test_reasoning_gym_scores_its_own_entries(task):
    stream = open_source(f"reasoning_gym:{task}", {}, 1)
    for _ in range(5):
        row = next(stream)
        assert score(row["label"], row["label"], "reasoning_gym", row["metadata"]) == 1.0
        assert score("", row["label"], "reasoning_gym", row["metadata"]) == 0.0
        assert score(row["label"] + " no", row["label"], "reasoning_gym", row["metadata"]) == 0.0


def test_partial_scores_only_when_asked_for():
    row = next(open_source("reasoning_gym:basic_arithmetic", {"partial": True}, 1))
    half = score(row["label"] * 2, row["label"], "reasoning_gym", row["metadata"])
    assert 0 < half < 1
    whole = {k: v for k, v in row["metadata"].items() if k != "partial"}
    assert score(row["label"] * 2, row["label"], "reasoning_gym", whole) == 0.0


def test_many_at_once_in_one_loop_and_again_in_another():
    row = next(open_source("reasoning_gym:basic_arithmetic", {}, 1))
    reward = load_reward(RewardSection(type="reasoning_gym"))
    samples = [Sample(index=i, response=row["label"], metadata=row["metadata"]) for i in range(50)]

    async def all_of_them():
        return await asyncio.gather(*(reward(None, s) for s in samples))

    assert asyncio.run(all_of_them()) == asyncio.run(all_of_them()) == [1.0] * 50


def test_rows_a_scorer_cannot_use():
    with pytest.raises(DataError, match=r"sample 7: the row has no metadata\.reasoning_gym"):
        score("1", "1", "reasoning_gym")
    with pytest.raises(DataError, match="needs a label"):
        score("1", None, "exact")
    with pytest.raises(DataError, match="not a regular expression"):
        score("1", "(", "regex")
    for kind in ("exact", "math"):
        with pytest.raises(DataError, match=r"metadata\.extract = 'last_nmber'"):
            score("1", "1", kind, {"extract": "last_nmber"})
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        load_reward(RewardSection(type="exakt"))


OWN = """
import asyncio, time

def plain(args, sample, **kw):
    return len(sample.response)

async def waits(args, sample, **kw):
    await asyncio.sleep(0)
    return {"score": 1, "acc": 0.5}

def hangs(args, sample):
    time.sleep(30)

async def hangs_async(args, sample):
    await asyncio.sleep(30)

def raises(args, sample):
    return 1 / 0

def times_out_itself(args, sample):
    raise TimeoutError("upstream server")

def says_none(args, sample):
    return None

def says_nan(args, sample):
    return float("nan")

def ranks(args, samples, **kw):
    return [float(i) for i, _ in enumerate(samples)]

def too_few(args, samples):
    return [1.0]

def wrong(sample):
    return 1.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path}/own.py:{name}"


def test_own_functions(own):
    assert score("abc", None, path=own("plain")) == 3.0
    assert score("abc", None, path=own("waits")) == {"score": 1.0, "acc": 0.5}


def test_threads_are_used_again_but_not_while_one_hangs(own):
    def threads():
        return {t.ident for t in threading.enumerate() if t.name == "slime-reward"}

    score("a", "a")
    before = threads()
    for _ in range(30):
        assert score("a", "a") == 1.0
    assert before and threads() == before
    with pytest.raises(RewardTimeout):
        score("a", "b", path=own("hangs"), timeout_s=0.1)
    assert score("a", "a") == 1.0


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
def test_deadline(own, name):
    start = time.perf_counter()
    with pytest.raises(RewardTimeout, match=r"longer than 0\.1 s for sample 7"):
        score("a", "b", path=own(name), timeout_s=0.1)
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised ZeroDivisionError for sample 7"),
        ("times_out_itself", "raised TimeoutError for sample 7: upstream server"),
        ("says_none", "returned None for sample 7"),
        ("says_nan", "returned nan for sample 7"),
    ],
)
def test_failures_name_function_and_sample(own, name, message):
    with pytest.raises(SlimeError) as caught:
        score("a", "b", path=own(name))
    assert message in caught.value.what and f"own.py:{name}" in caught.value.what
    if name == "raises":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_groups(own):
    samples = [Sample(index=i, response="81", label="81") for i in range(3)]
    ranks = load_reward(RewardSection(path=own("ranks"), group=True))
    assert asyncio.run(ranks(None, samples)) == [0.0, 1.0, 2.0]
    builtin = load_reward(RewardSection(type="exact", group=True))
    assert asyncio.run(builtin(None, samples)) == [1.0, 1.0, 1.0]
    with pytest.raises(SlimeError, match="returned 1 scores for 3 samples"):
        asyncio.run(load_reward(RewardSection(path=own("too_few"), group=True))(None, samples))


def test_signature_is_checked_at_load(own):
    with pytest.raises(UsageError, match=r"called with \(args, sample\)"):
        load_reward(RewardSection(path=own("wrong")))


def test_registry_points_at_functions():
    server = {"url": "http://127.0.0.1:1"}
    for name in REWARDS:
        section = {"rm_url": server["url"], "judge": server, "mix": {"math": 1.0}, "group": name == "tournament"}
        assert callable(load_reward(RewardSection.model_validate(section | {"type": name})))


def test_the_docs_list_every_scorer():
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]*\|$", text, re.MULTILINE)) == sorted(REWARDS)


def test_each_keeps_failures_apart():
    reward = load_reward(RewardSection(type="regex"))
    good = Sample(index=1, response="7", label="7")
    broken = Sample(index=2, response="7", label="(")
    scores = asyncio.run(reward.each(None, [good, broken, good]))
    assert scores[0] == scores[2] == asyncio.run(reward(None, good))
    assert isinstance(scores[1], SlimeError) and "sample 2" in scores[1].what


def test_each_of_an_own_function_fails_one_by_one(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def score(args, sample):\n    return 1.0 / sample.index\n")
    reward = load_reward(RewardSection(path=f"{path}:score"))
    scores = asyncio.run(reward.each(None, [Sample(index=0), Sample(index=2)]))
    assert isinstance(scores[0], SlimeError) and "ZeroDivisionError" in scores[0].what
    assert scores[1] == 0.5


def test_each_meets_its_deadline(monkeypatch):
    import slimecli.data_tools.rewards as rewards

    monkeypatch.setattr(rewards, "load_scorer", lambda name: lambda response, label, metadata: time.sleep(0.5))
    reward = load_reward(RewardSection(type="exact", timeout_s=0.05))
    scores = asyncio.run(reward.each(None, [Sample(index=0), Sample(index=1)]))
    assert all(isinstance(s, RewardTimeout) for s in scores)


def test_a_forked_child_starts_threads_of_its_own():
    assert score("81", "81") == 1.0
    assert idle_threads, "the thread of the call above waits for work"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: os._exit(0 if score("81", "81", timeout_s=5) == 1.0 else 1))
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_what_is_done_when_the_deadline_comes_counts(monkeypatch):
    import slimecli.data_tools.rewards as rewards

    def slow_on_two(response, label, metadata):
        time.sleep(5 if response == "2" else 0)
        return 1.0

    monkeypatch.setattr(rewards, "load_scorer", lambda name: slow_on_two)
    reward = load_reward(RewardSection(type="exact", timeout_s=0.3))
    first, late, after = asyncio.run(reward.each(None, [Sample(index=i, response=str(i)) for i in (1, 2, 3)]))
    assert first == 1.0 and isinstance(late, RewardTimeout) and isinstance(after, RewardTimeout)
    assert "sample 2" in late.what


def test_a_row_that_names_no_scorer_fails_alone():
    reward = load_reward(RewardSection(type="exact"))
    samples = [
        Sample(index=0, response="1", label="1", metadata={"rm_type": "mth"}),
        Sample(index=1, response="1", label="1"),
    ]
    wrong, right = asyncio.run(reward.each(None, samples))
    assert isinstance(wrong, UsageError) and "did you mean 'math'" in wrong.what and right == 1.0
