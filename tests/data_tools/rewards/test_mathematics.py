import asyncio
import importlib.util
import time

import pytest

from slimecli.data_tools.rewards import load_reward, solver
from slimecli.data_tools.rewards.answers import deepscaler
from slimecli.data_tools.rewards.mathd import mathd_equal, mathd_normalise, sympy_equal, sympy_normalise
from slimecli.data_tools.rewards.mathematics import equal, score
from slimecli.errors import DataError, SlimeError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac12", "1/2", True),
        ("\\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}{2}", True),
        ("\\frac{\\frac{1}{2}}{3}", "1/6", True),
        ("−3", "-3", True),
        ("50\\%", "50", True),
        ("50%", "0.5", False),
        ("12 cm", "12", True),
        ("12\\text{ cm}^2", "12", True),
        ("90^\\circ", "90", True),
        ("\\$5", "5", True),
        ("1{,}000", "1000", True),
        ("3 million", "3*10^6", True),
        ("x = 5", "5", True),
        ("(-\\infty, 3]", "(−∞,3]".replace("∞", "\\infty"), True),
        ("(1, 3)", "[1, 3]", False),
        ("[0, 1)", "[0,1]", False),
        ("\\left(1,\\frac{1}{2}\\right)", "(1, 0.5)", True),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("\\{1, 2\\}", "\\{2, 2\\}", False),
        ("(1,2)", "(2,1)", False),
        ("1, 2", "1", False),
        ("1,2", "1, 2", True),
        ("1 \\text{ or } 2", "1", False),
        ("1 \\text{ or } 2", "1,2", True),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("\\text{Monday}", "Monday", True),
        ("monday", "Monday", True),
        ("\\sqrt{x-5}", "\\sqrt{-5+x}", True),
        ("3+2i", "2i+3", True),
        ("3+2i", "3-2i", False),
        ("x^2-1", "(x-1)(x+1)", True),
        ("x^2-1", "(x-1)^2", False),
        ("2.50", "2.5", True),
        ("0.333", "1/3", False),
        (".5", "0.5", True),
        ("", "0", False),
        ("0", "0", True),
        ("i", "j", False),
        ("\\frac{1}{0}", "5", False),
        ("1e400", "1e500", False),
    ],
)
def test_equal(given, wanted, same):
    assert equal(given, wanted) is same
    assert equal(wanted, given) is same


def test_the_last_box_counts_with_its_braces():
    assert score("first \\boxed{1} then \\boxed{\\frac{a}{b^{2}}}", "\\frac{a}{b^{2}}", {}) == 1.0
    assert score("\\boxed{2} or \\boxed{3}", "2", {}) == 0.0
    assert score("\\boxed{\\frac{1}{2}", "1/2", {}) == 0.0
    assert score("the answer is 5", "5", {}) == 0.0
    assert score("\\boxed{0}", "0", {}) == 1.0
    assert score("\\boxed{7}", "thus \\boxed{7}", {}) == 1.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\\tfrac{1}{2}", "\\frac{1}{2}"),
        ("0.5", "\\frac{1}{2}"),
        ("1/2", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("k = 7", "7"),
        ("10\\text{ units}", "10"),
        ("\\text{yes}", "yes"),
        (".25", "0.25"),
        ("\\left( 1 , 2 \\right)", "(1,2)"),
    ],
)
def test_mathd_normalise(text, normal):
    assert mathd_normalise(text) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("5 degrees", "5"),
        ("3.0", "3"),
        ("1,000", "1000"),
        ("\\frac{3}{4}", "3/4"),
        ("2 3/4", "2+3/4"),
        ("\\{Apple\\}", "apple"),
        ("2 million", "2*10^6"),
    ],
)
def test_sympy_normalise(text, normal):
    assert sympy_normalise(text) == normal


def test_the_published_rules_are_stricter_than_ours():
    assert not sympy_equal("2/4", "1/2") and not mathd_equal("2/4", "1/2") and equal("2/4", "1/2")
    assert sympy_equal("2 1/2", "\\frac{5}{2}") and not sympy_equal("2.5", "3")
    assert not sympy_equal("4", "8/2"), "an integer is written as one"
    assert not sympy_equal("x^10", "x^5*x^5"), "high powers are not evaluated"


def test_deepscaler_wants_the_end_of_thinking():
    assert deepscaler("<think>a</think> \\boxed{5}", "5", {}) == 1.0
    assert deepscaler("</think>\\boxed{4}</think>\\boxed{5}", "5", {}) == 1.0
    assert deepscaler("\\boxed{5}</think> done", "5", {}) == 0.0
    assert deepscaler("</think>\\boxed{5}</think> done", "5", {}) == 0.0, "after the last one"
    assert deepscaler("\\boxed{5}", "5", {}) == 0.0
    assert deepscaler("###Response \\boxed{5}", "\\boxed{5}", {}) == 1.0
    assert deepscaler("</think> 5", "5", {}) == 0.0
    with pytest.raises(DataError, match="needs a label"):
        deepscaler("</think>\\boxed{5}", "", {})


@pytest.mark.parametrize(
    "text", ["9^9^9^9", "9**9**9**9", "sqrt(-1)^99999999", "(" * 200, "x" * 5000, "__import__('os')", "i^(10^9)"]
)
def test_nasty_answers_are_quick(text):
    start = time.perf_counter()
    assert equal(text, "1") is False
    assert time.perf_counter() - start < 2


def test_an_undecided_answer_is_a_failure_and_the_next_one_works(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    stuck = 'if question["first"] == "i*7":\n            import time\n\n            time.sleep(60)\n        if True:'
    program.write_text(solver.PROGRAM.read_text().replace('if question["op"] == "equal":', stuck))
    monkeypatch.setattr(solver, "PROGRAM", program)
    monkeypatch.setattr(solver, "_solver", solver._Solver())
    monkeypatch.setattr(solver, "SECONDS", 0.3)
    reward = load_reward(RewardSection(type="math"))
    samples = [Sample(index=i, response=f"\\boxed{{{x}}}", label="1+2i") for i, x in enumerate(("2i+1", "i*7", "2i+1"))]
    first, late, again = asyncio.run(reward.each(None, samples))
    assert first == 1.0 and again == 1.0
    assert isinstance(late, SlimeError) and "sample 1" in late.what and "no end" in late.what


def test_math_verify_is_used_as_it_is():
    reward = load_reward(RewardSection(type="math_verify"))

    def scored(response, label):
        return asyncio.run(reward(None, Sample(index=0, response=response, label=label)))

    assert scored("so $\\boxed{\\{2, 1\\}}$", "\\{1,2\\}") == 1.0
    assert scored("$x \\in [1, 2)$", "$[1,2)$") == 1.0
    assert scored("\\boxed{[1,2]}", "[1,2)") == 0.0
    assert scored("", "5") == 0.0


def test_math_verify_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SlimeError) as caught:
        asyncio.run(load_reward(RewardSection(type="math_verify"))(None, Sample(index=0, response="1", label="1")))
    assert "slimecli[math]" in caught.value.fix
