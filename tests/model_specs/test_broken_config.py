"""config.json files that no model has, or that say what a layout cannot express."""

import pytest

from slimecli.errors import DataError
from slimecli.model_specs import from_config, get_spec
from slimecli.model_specs.config import FOREIGN, SECTIONS


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


STRANGE = {
    "qwen3-4b": [
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts": 8}, "num_experts is 8, expected none"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, expected none"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads is 4, expected none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, expected 0"),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types has 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "beta_fast": 3}}, "beta_fast = 3, which llama3 does"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is 'awq'"),
        ({"vocab_size": "many"}, "a value is not of its type: vocab_size is 'many'"),
        ({"num_key_value_heads": "few"}, "a value is not of its type"),
        ({"rope_theta": [1]}, "a value is not of its type"),
    ],
    "qwen3-30b-a3b": [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers: the layers with a dense MLP are [3], expected the first ones"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, expected none"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, expected 1.0"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'softmax'"),
    ],
    "qwen2.5-7b": [({"attention_bias": False}, "attention_bias is False, expected True")],
    "mixtral-8x7b": [
        ({"sliding_window": 4096}, "sliding_window is 4096, expected none"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, expected 0.0"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, expected none"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
    ],
    "qwen2-57b-a14b": [
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [27]}, "mlp_only_layers: the layers with a dense MLP are [27], expected the first ones"),
    ],
    "qwen3.5-35b-a3b": [({"mlp_only_layers": [0]}, "1 layers have a dense MLP, expected none")],
    "deepseek-v3": [
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"index_topk": 2048}, "index_topk is 2048, expected none"),
    ],
    "glm-4.7-flash": [({"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 45}, "mlp_layer_types: the layers")],
    "glm-5.2": [({"indexer_types": ["full", "shared", "shared", "full"] + ["full"] * 74}, "indexer_types does not")],
    "qwen3-next-80b-a3b-instruct": [({"full_attention_interval": 3}, "layer_types does not fit: expected every 3th")],
    "minimax-m2": [
        ({"use_qk_norm": False}, "use_qk_norm is False, expected"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"use_routing_bias": False}, "use_routing_bias is False"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, expected none"),
    ],
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_a_layout_cannot_express_is_named(name):
    config = get_spec(name).to_config()
    for change, said in STRANGE[name]:
        inner = config.get("text_config", config)
        text = {**inner, **change}
        with pytest.raises(DataError) as caught:
            from_config(text if inner is config else {**config, "text_config": text})
        assert said in caught.value.what, change


def test_all_strange_fields_are_named_at_once():
    config = {**get_spec("deepseek-v3").to_config(), "topk_method": "greedy", "hidden_act": "gelu", "moe_layer_freq": 2}
    with pytest.raises(DataError, match=r"hidden_act is 'gelu'.*topk_method is 'greedy'|topk_method.*hidden_act") as e:
        from_config(config)
    assert "moe_layer_freq is 2" in e.value.what


def test_sections_of_their_own_are_needed_to_be_foreign():
    assert set(FOREIGN) == set(SECTIONS)
    with pytest.raises(DataError, match="lacks text_config"):
        from_config({"model_type": "qwen3_5", "hidden_size": 4})
