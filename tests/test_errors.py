import pickle

import pytest

from slimecli import errors
from slimecli.errors import ExitCode, RecipeError, SlimeError, nearest

KINDS = {
    errors.SlimeError: 1,
    errors.UsageError: 2,
    errors.MissingStageError: 3,
    errors.DataError: 4,
    errors.GateError: 5,
    errors.PartialError: 6,
    errors.InterruptedRunError: 130,
}


@pytest.mark.parametrize(("kind", "code"), KINDS.items())
def test_exit_codes_are_the_contract(kind, code):
    error = kind("what is wrong", "what to type")
    assert error.exit_code == code
    assert str(error) == "what is wrong\n  fix: what to type"


def test_a_recipe_error_keeps_every_problem_and_crosses_process_borders():
    error = RecipeError(["first", "second"], source="a.toml")
    back = pickle.loads(pickle.dumps(error))
    assert back.problems == ["first", "second"]
    assert str(back) == str(error)
    assert "2 problem(s) in a.toml" in str(back)
    assert back.exit_code == ExitCode.USAGE


def test_errors_of_actors_cross_process_borders():
    back = pickle.loads(pickle.dumps(SlimeError("what", "fix")))
    assert (back.what, back.fix) == ("what", "fix")


def test_nearest_names_one_candidate_or_none():
    assert nearest("grop", ["grpo", "sft"]) == " (did you mean 'grpo'?)"
    assert nearest("zzz", ["grpo", "sft"]) == ""
