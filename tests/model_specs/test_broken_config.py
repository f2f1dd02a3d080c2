"""config.json files that no model has."""

import pytest

from slimecli.errors import DataError
from slimecli.model_specs import from_config, get_spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -64}, "hidden_size is -64, expected at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 16 heads"),
        ({"quantization_config": "fp8!"}, "quantization_config is 'fp8!', expected 'fp8'"),
    ],
)
def test_numbers_that_no_model_has(change, said):
    spec = get_spec("qwen3-0.6b")
    with pytest.raises(DataError, match=said):
        from_config({**spec.to_config(), **change})


def test_a_config_that_is_no_object():
    with pytest.raises(DataError, match="no JSON object"):
        from_config(["qwen3"])
    assert get_spec("qwen3-0.6b").check([]) == ["config.json is no JSON object"]
