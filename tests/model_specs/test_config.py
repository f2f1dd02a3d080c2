"""config.json <-> ModelSpec, in the words of every family."""

import dataclasses
import json

import pytest

from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec, RopeScaling, families, from_config, get_spec
from slimecli.model_specs.config import SECTIONS, flat, trait
from tests.models import FAMILIES, tiny_config

ONE_OF_EACH = {
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-4b",
    "llama": "llama3.1-8b",
    "mimo": "mimo-7b-rl",
    "glm4": "glm-4-9b-0414",
    "qwen3_moe": "qwen3-30b-a3b",
    "mixtral": "mixtral-8x7b",
    "qwen2_moe": "qwen2-57b-a14b",
    "glm4_moe": "glm-4.5",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2-instruct",
    "glm4_moe_lite": "glm-4.7-flash",
    "glm_moe_dsa": "glm-5.2",
    "qwen3_next": "qwen3-next-80b-a3b-instruct",
    "qwen3_5": "qwen3.5-27b",
    "qwen3_5_moe": "qwen3.5-35b-a3b",
}

HUB = {
    "glm-4.7": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 202752, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "num_hidden_layers": 92, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 151552,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "dtype": "bfloat16", "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
        "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
        "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
        "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
    },
    "kimi-k2-instruct": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "qwen3.5-27b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
            "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
            "num_key_value_heads": 4, "output_gate_type": "swish", "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06, "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default",
            },
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
        },
        "tie_word_embeddings": False, "vision_config": {"depth": 27, "hidden_size": 1152},
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5472, "max_position_embeddings": 262144,
        "max_window_layers": 28, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "qkv_bias": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "shared_expert_intermediate_size": 0, "sliding_window": None,
        "tie_word_embeddings": False, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "mixtral-8x22b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 16384,
        "max_position_embeddings": 65536, "model_type": "mixtral", "num_attention_heads": 48,
        "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "qwen2-57b-a14b": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2_moe",
        "moe_intermediate_size": 2560, "norm_topk_prob": False, "num_attention_heads": 28, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
"""as published (qwen3-30b-a3b: the form of Qwen3-Coder-30B; its intermediate_size is the width of no weight)"""


@pytest.mark.parametrize("name", HUB)
def test_published_configs_are_those_of_the_registry(name):
    assert get_spec(name).check(HUB[name]) == []


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_transformers_keeps_every_number(family):
    from transformers import AutoConfig

    spec = get_spec(ONE_OF_EACH[family])
    values = spec.to_config()
    assert values["model_type"] == family
    stand_in = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}.get(family, family)
    again = json.loads(AutoConfig.for_model(**{**values, "model_type": stand_in}).to_json_string())
    if family == "mimo":
        again["head_dim"] = spec.head_dim
    again["model_type"] = family
    assert spec.check(again) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_understood(family):
    spec = from_config(json.loads(tiny_config(family).to_json_string()))
    assert spec.hidden == 64 and spec.heads == 4 and spec.rope_theta > 0
    assert spec.check(spec.to_config()) == []
    assert (spec.moe is not None) == ("moe" in spec.family.traits)


def test_every_family_is_tried():
    assert set(ONE_OF_EACH) | {"qwen3_5_text", "qwen3_5_moe_text"} == set(families())


# -- check, both ways --------------------------------------------------------------------------------------------------

OTHER = {"qk_norm": {"head": "", "": "head"}, "rope_scaling": RopeScaling(rope_type="llama3", factor=2.0)}


def changed(spec: ModelSpec, path: str) -> ModelSpec:
    """The spec with another value of one field, and of what follows from it."""
    section, _, name = path.rpartition(".")
    if path == "rope_scaling":
        return dataclasses.replace(spec, rope_scaling=None if spec.rope_scaling else OTHER[path])
    if section:
        part = getattr(spec, section)
        value = getattr(part, name)
        new = {"rope_type": "llama3", "shared_ffn": 2 * spec.moe.ffn + value if spec.moe else 0}.get(name)
        new = new if new is not None else not value if isinstance(value, bool) else value + 1
        spec = dataclasses.replace(spec, **{section: dataclasses.replace(part, **{name: new})})
        return dataclasses.replace(spec, head_dim=spec.mla.rope_dim) if path == "mla.rope_dim" else spec
    value = getattr(spec, name)
    if name == "qk_norm":
        return dataclasses.replace(spec, qk_norm=OTHER[name][value])
    new = not value if isinstance(value, bool) else value / 2 if name == "rotary" else value + 1
    return dataclasses.replace(spec, **{name: new})


def readable(spec: ModelSpec) -> list[str]:
    """Fields that a config of the family states."""
    fixed = {"unit_norms", "sandwich", "gated", "interleaved", "qkv_bias", "qk_norm", "rotary", "mtp"}
    fixed |= {f"moe.{n}" for n in ("score", "scale", "groups", "top_groups", "bias", "shared_gate", "shared_ffn")}
    keys, out = spec.family.keys, []
    for path in flat(spec) | {"rope_scaling": None}:
        section = path.rpartition(".")[0]
        always = path == "rope_theta" or (
            path not in fixed and path != "moe.dense_layers" and trait(spec.family, path) is None
        )
        if path in SECTIONS or (path == "ffn" and not spec.dense_layers) or (spec.mla and path == "head_dim"):
            continue
        if path == "rope_scaling.rope_type" or (section == "rope_scaling" and "freq_factor" in path and spec.mla):
            continue
        if section == "rope_scaling" and not spec.mla and path.rpartition(".")[2].startswith(("beta", "mscale")):
            continue
        if always or path in keys:
            out.append(path)
    return out


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_check_names_every_field(family):
    spec = get_spec(ONE_OF_EACH[family])
    fields = readable(spec)
    assert {"layers", "kv_heads", "vocab", "tied", "eps", "rope_theta", "rope_scaling"} <= set(fields)
    for path in fields:
        other = changed(spec, path)
        said = spec.check(other.to_config())
        mine, theirs = flat(spec).get(path), flat(other).get(path)
        assert any(line.startswith(f"{path}: spec ") for line in said), (path, said)
        if path != "rope_scaling":
            numbers = [f"{v:g}" if isinstance(v, float) else str(v) if v != "" else "none" for v in (mine, theirs)]
            assert f"{path}: spec {numbers[0]}, config {numbers[1]}" in said
        assert any(line.startswith(f"{path}: spec ") for line in other.check(spec.to_config())), path
        follow = {"moe.ffn": {"moe.shared_ffn", "ffn"}, "mla.rope_dim": {"head_dim"}, "head_dim": {"rotary"}}.get(
            path, set()
        )
        assert {line.partition(":")[0] for line in said} <= {path} | follow


def test_what_check_covers():
    names = {path for name in ONE_OF_EACH.values() for path in readable(get_spec(name))}
    assert names >= {
        "kv_heads", "head_dim", "vocab", "qk_norm", "qkv_bias", "rope_theta", "rotary", "tied", "mtp",
        "rope_scaling", "rope_scaling.factor", "rope_scaling.original_max_positions", "rope_scaling.mscale",
        "moe.experts", "moe.top_k", "moe.ffn", "moe.shared_ffn", "moe.dense_layers", "moe.normalize", "moe.scale",
        "moe.groups", "moe.top_groups", "mla.q_rank", "mla.kv_rank", "mla.nope_dim", "mla.rope_dim", "mla.v_dim",
        "indexer.heads", "indexer.head_dim", "indexer.top_k", "indexer.every", "indexer.offset",
        "linear.key_heads", "linear.value_heads", "linear.key_dim", "linear.value_dim", "linear.conv",
        "linear.full_every",
    }  # fmt: skip


def test_check_names_all_at_once():
    spec = get_spec("deepseek-v3")
    wrong = {"num_experts_per_tok": 6, "v_head_dim": 64, "scoring_func": "softmax", "vocab_size": 129281}
    said = spec.check({**spec.to_config(), **wrong})
    assert "moe.top_k: spec 8, config 6" in said and "mla.v_dim: spec 128, config 64" in said
    assert "vocab: spec 129280, config 129281" in said
    assert "config.json: scoring_func is 'softmax', expected 'sigmoid'" in said and len(said) == 4


def test_check_sees_another_family():
    qwen, llama = get_spec("qwen3-0.6b"), get_spec("llama3.1-8b")
    found = qwen.check({**qwen.to_config(), "model_type": "qwen2", "attention_bias": None})
    assert "qk_norm: spec head, config none" in found and "qkv_bias: spec False, config True" in found
    assert "model_type: spec qwen3, config qwen2" in found
    assert llama.check({**llama.to_config(), "rope_scaling": None}) == ["rope_scaling: spec llama3 x8, config none"]
    assert "of no known family" in qwen.check({"model_type": "gpt2"})[0]
    assert qwen.check({**qwen.to_config(), "hidden_size": "x"}) == [
        "config.json: a value is not of its type: hidden_size is 'x'"
    ]
    assert qwen.check({**qwen.to_config(), "max_position_embeddings": 7}) == []


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_missing_numbers_are_named_at_once(family):
    spec = get_spec(ONE_OF_EACH[family])
    config = spec.to_config()
    text = config.get("text_config", config)
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
    needed += ["num_experts_per_tok"] * bool(spec.moe) + ["kv_lora_rank", "v_head_dim", "q_lora_rank"] * bool(spec.mla)
    needed += ["index_head_dim"] * bool(spec.indexer) + ["linear_conv_kernel_dim"] * bool(spec.linear)
    for key in needed:
        text.pop(key)
    with pytest.raises(DataError, match="lacks") as caught:
        from_config(config)
    assert set(caught.value.what.removeprefix("config.json lacks ").split(", ")) == set(needed)
    assert any(line.startswith("config.json lacks") for line in spec.check(config))


# -- the same thing said in other words --------------------------------------------------------------------------------


def test_rope_in_either_form():
    spec = get_spec("llama3.1-8b")
    config = spec.to_config()
    scaling = config.pop("rope_scaling")
    new = {**config, "rope_theta": None, "rope_parameters": {**scaling, "rope_theta": spec.rope_theta}}
    assert spec.check(new) == []
    old = {**config, "rope_scaling": {**{k: v for k, v in scaling.items() if k != "rope_type"}, "type": "llama3"}}
    assert spec.check(old) == []
    glm = get_spec("glm-4.5")
    words = glm.to_config()
    part = words.pop("partial_rotary_factor")
    assert glm.check({**words, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": part}}) == []
    assert glm.check(words) == ["config.json lacks partial_rotary_factor"]


def test_yarn_needs_its_original_length():
    config = get_spec("deepseek-v3").to_config()
    del config["rope_scaling"]["original_max_position_embeddings"]
    with pytest.raises(DataError, match="lacks rope_scaling.original_max_position_embeddings"):
        from_config(config)


def test_layers_in_either_form():
    flash, glm5 = get_spec("glm-4.7-flash"), get_spec("glm-5.2")
    config = flash.to_config()
    assert config.pop("mlp_layer_types")[:2] == ["dense", "sparse"]
    assert flash.check(config) == [] and config["first_k_dense_replace"] == 1
    words = glm5.to_config()
    kinds = words.pop("indexer_types")
    assert kinds.count("full") == 21 and glm5.check(words) == []
    pattern = "".join("F" if k == "full" else "S" for k in kinds)
    plain = {k: v for k, v in words.items() if k not in ("index_topk_freq", "index_skip_topk_offset")}
    assert glm5.check({**plain, "indexer_types": kinds}) == []
    assert glm5.check({**plain, "index_topk_pattern": pattern}) == []
    assert glm5.check(plain) == ["indexer.every: spec 4, config 1", "indexer.offset: spec 3, config 1"]
    hybrid = get_spec("qwen3-next-80b-a3b-instruct").to_config()
    for left in ("layer_types", "full_attention_interval"):
        assert get_spec("qwen3-next-80b-a3b-instruct").check({k: v for k, v in hybrid.items() if k != left}) == []


def test_prediction_layers_where_the_config_is_silent():
    spec = get_spec("qwen3-next-80b-a3b-instruct")
    config = {k: v for k, v in spec.to_config().items() if k != "num_nextn_predict_layers"}
    assert from_config(config).mtp == 1
    assert from_config({**config, "num_nextn_predict_layers": 0}).mtp == 0
    deepseek = get_spec("deepseek-v3").to_config()
    assert deepseek.pop("num_nextn_predict_layers") == 1
    assert from_config(deepseek).mtp == 0 and from_config({**deepseek, "num_mtp_layers": 2}).mtp == 2


def test_quantized_weights_are_the_same_model():
    spec = get_spec("kimi-k2-thinking")
    for stored in ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, {"quant_method": "fp8"}):
        assert spec.check({**spec.to_config(), "quantization_config": stored}) == []


def test_language_model_saved_alone():
    whole = get_spec("qwen3.5-4b")
    alone = {**whole.to_config()["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    spec = from_config(alone, "alone")
    assert spec.family.model_type == "qwen3_5_text" and spec.params == whole.params
    assert whole.check(alone) == ["model_type: spec qwen3_5, config qwen3_5_text"]
