import dataclasses

import pytest

from slimecli.errors import DataError, UsageError
from slimecli.model_specs import from_config, get_spec, registry
from tests.models import tiny_config

PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b-instruct": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
"""as the hub shows them for the safetensors (tied output layer counted once)"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert get_spec(name).params == PUBLISHED[name]


@pytest.mark.parametrize("name", registry())
def test_config_round_trip(name):
    spec = get_spec(name)
    assert spec.check(spec.to_config()) == []
    again = from_config(spec.to_config(), name=name)
    kept = {"repo": spec.repo, "revision": spec.revision, "source": spec.source, "note": spec.note}
    assert dataclasses.replace(again, **kept) == spec
    assert spec.source


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_transformers_own_configs_are_understood(family):
    config = tiny_config(family)
    spec = from_config(config.to_dict())
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (3, 64, 4, 2, 16)
    assert spec.rope_theta == 10000.0
    assert (spec.rope_scaling is not None) == (family == "llama")
    assert spec.check(config.to_dict()) == []


FAULTS = {
    "num_hidden_layers": (27, "layers: spec 28, config 27"),
    "num_key_value_heads": (4, "kv_heads: spec 8, config 4"),
    "head_dim": (64, "head_dim: spec 128, config 64"),
    "vocab_size": (152064, "vocab: spec 151936, config 152064"),
    "rope_theta": (10000.0, "rope_theta: spec 1e+06, config 10000"),
    "tie_word_embeddings": (False, "tied: spec True, config False"),
    "rms_norm_eps": (1e-5, "eps: spec 1e-06, config 1e-05"),
    "intermediate_size": (3071, "ffn: spec 3072, config 3071"),
}


def test_check_names_every_differing_field_at_once():
    spec = get_spec("qwen3-0.6b")
    for key, (value, said) in FAULTS.items():
        assert spec.check({**spec.to_config(), key: value}) == [said]
    everything = spec.check({**spec.to_config(), **{k: v for k, (v, _) in FAULTS.items()}})
    assert sorted(everything) == sorted(said for _, said in FAULTS.values())


def test_check_sees_family_and_scaling():
    qwen, llama = get_spec("qwen3-0.6b"), get_spec("llama3.1-8b")
    found = qwen.check({**qwen.to_config(), "model_type": "qwen2"})
    assert "qk_norm: spec head, config none" in found and "qkv_bias: spec False, config True" in found
    assert any("rope_scaling" in line for line in llama.check({**llama.to_config(), "rope_scaling": None}))
    assert "sliding" in qwen.check({**qwen.to_config(), "use_sliding_window": True})[0]


def test_traps():
    assert get_spec("qwen2.5-1.5b").rope_theta == 1e6
    assert get_spec("qwen2.5-math-1.5b").rope_theta == 1e4
    assert (get_spec("qwen2.5-32b").eps, get_spec("qwen2.5-32b-instruct").eps) == (1e-5, 1e-6)
    assert get_spec("qwen3-4b-instruct-2507").rope_theta == 5e6


def test_names():
    assert get_spec("Qwen/Qwen3-4B") is get_spec("qwen3-4b")
    with pytest.raises(UsageError, match="did you mean 'qwen3-8b'"):
        get_spec("qwen3-88b")
    with pytest.raises(DataError, match="did you mean 'qwen3'"):
        from_config({"model_type": "qwen33"})
    with pytest.raises(DataError, match="hidden_size, vocab_size"):
        from_config(
            {k: v for k, v in get_spec("qwen3-4b").to_config().items() if k not in ("hidden_size", "vocab_size")}
        )


def test_derived_numbers():
    spec = get_spec("qwen3-4b")
    assert spec.kv_bytes_per_token() == 2 * 36 * 8 * 128 * 2
    assert spec.weight_bytes("float32") == 4 * spec.params
    assert spec.flops_per_token(0) == pytest.approx(2 * spec.params, rel=1e-3)
    assert spec.flops_per_token(100, backward=True) == 3 * (spec.flops_per_token(0) + 4 * 36 * 32 * 128 * 100)
    assert get_spec("quickstart").params == 167_200
    args = spec.megatron_args()
    assert args["num-query-groups"] == 8 and args["qk-layernorm"] is True
    assert "untie-embeddings-and-output-weights" not in args
    assert get_spec("llama3.1-8b").megatron_args()["rope-scaling-factor"] == 8.0
