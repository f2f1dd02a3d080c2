import pytest

from slimecli.errors import UsageError
from slimecli.flags import megatron_overrides
from slimecli.recipe import load_recipe


def test_flags_become_values_of_the_megatron_table():
    words = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--lr-mult=-0.5", "--a", "[1, 2]", "--b", "x"]
    recipe = load_recipe("", megatron_overrides(words))
    assert recipe.megatron == {
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "lr-mult": -0.5,
        "a": [1, 2],
        "b": "x",
    }
    assert megatron_overrides([]) == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [(["2"], "'2' is no option"), (["--"], "no option"), (["--a", "1", "2"], "--a has 2 values: 1 2")],
)
def test_what_is_no_flag_is_refused(words, told):
    with pytest.raises(UsageError, match=told):
        megatron_overrides(words)
