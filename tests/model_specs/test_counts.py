import pytest
import torch

from slimecli.model_specs import counts, get_spec, registry

EXACT = {
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
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b-instruct": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
}
"""as the hub shows them for the safetensors (tied output layer counted once)"""

ROUNDED = {
    "qwen3.5-0.8b": ("0.8", ""),
    "qwen3.5-4b": ("4", ""),
    "qwen3.5-9b": ("9", ""),
    "qwen3.5-27b": ("27", ""),
    "qwen3.5-35b-a3b": ("35", "3 whole"),
    "qwen3.6-35b-a3b": ("35", "3 whole"),
    "qwen3-30b-a3b": ("30.5", "3.3 whole"),
    "qwen3-235b-a22b": ("235", "22 whole"),
    "qwen3-next-80b-a3b-instruct": ("80", "3 layers"),
    "glm-4.7-flash": ("30", "3 layers"),
    "glm-5": ("744", "40 layers"),
    "deepseek-v3": ("671", "37 output"),
    "deepseek-r1": ("671", "37 output"),
    "kimi-k2-instruct": ("1026", "32 output"),
    "kimi-k2-thinking": ("1026", "32 output"),
    "moonlight-16b-a3b": ("16", "2.24 layers"),
    "minimax-m2": ("229", "10 output"),
    "mixtral-8x7b": ("47", "13 whole"),
    "mixtral-8x22b": ("141", "39 whole"),
    "qwen1.5-moe-a2.7b": ("14.3", "2.7 whole"),
    "qwen2-57b-a14b": ("57", "14 whole"),
    "mimo-7b-rl": ("7.6", ""),
}
"""billions as published, in all and per token; the latter without the embedding (`output`) or both tables (`layers`)"""

WITH_MTP = {"glm-4.5": ("358", 2), "glm-4.5-air": ("110", 2), "glm-5.2": ("753", 0)}
"""the hub's count of the safetensors, MTP layer included, and how many copies of the embedding it stores with that"""


def rounded(count: float, published: str) -> str:
    digits = len(published.partition(".")[2])
    return f"{count / 1e9:.{digits}f}"


@pytest.mark.parametrize("name", EXACT)
def test_counts_are_the_published_ones(name):
    assert get_spec(name).params == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_counts_round_to_the_published_ones(name):
    spec = get_spec(name)
    total, active = ROUNDED[name]
    assert rounded(spec.params, total) == total
    if active:
        number, what = active.split()
        table = spec.vocab * spec.hidden
        left_out = {"whole": 0, "output": table, "layers": 2 * table}[what]
        step = 10 ** -len(number.partition(".")[2])  # active sizes are cut off as often as they are rounded
        assert -step / 2 <= (spec.active_params - left_out) / 1e9 - float(number) < step
    else:
        assert spec.active_params == spec.params


@pytest.mark.parametrize("name", WITH_MTP)
def test_counts_with_prediction_layers(name):
    spec, (published, copies) = get_spec(name), WITH_MTP[name]
    assert rounded(spec.params + spec.mtp_params + copies * spec.vocab * spec.hidden, published) == published


def test_glm45_counts_as_its_report_does():
    spec = get_spec("glm-4.5")  # arXiv 2508.06471, table 1: with MTP, without embedding and output layer
    tables = 2 * spec.vocab * spec.hidden
    assert rounded(spec.params + spec.mtp_params - tables, "355") == "355"
    assert rounded(spec.active_params - tables, "32") == "32"
    assert rounded(get_spec("glm-4.5-air").active_params - 2 * 151552 * 4096, "12") == "12"


def one_of_each_shape():
    seen = {}
    for name, spec in registry().items():
        seen.setdefault((spec.family.model_type, spec.params), name)
    return list(seen.values())


@pytest.mark.parametrize("name", one_of_each_shape())
def test_transformers_builds_exactly_this_many(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = get_spec(name)
    values = spec.to_config()
    # transformers has no class for these two: Kimi K2 is DeepSeek V3, MiMo's decoder is Qwen2's
    values["model_type"] = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}.get(values["model_type"], values["model_type"])
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    own = {name: p.numel() for name, p in model.named_parameters()}
    assert not any("mtp" in name or f"layers.{spec.layers}." in name for name in own)
    assert sum(own.values()) == spec.params


def test_prediction_layers_are_decoder_layers_with_a_projection():
    spec = get_spec("mimo-7b-rl")
    layer = (spec.params - 2 * spec.vocab * spec.hidden - spec.hidden) // spec.layers
    assert spec.mtp_params == layer + 2 * 4096**2 + 3 * 4096
    deepseek = get_spec("deepseek-v3")
    assert rounded(deepseek.mtp_params, "11.6") == "11.6"  # README_WEIGHTS of the repository: 11.5 B without the tables
    stored = deepseek.params + deepseek.mtp_params + 2 * deepseek.vocab * deepseek.hidden
    assert rounded(stored * (1 + 1 / 128**2), "685") == "685"  # the hub counts the fp8 scales too
    assert get_spec("kimi-k2-instruct").mtp_params == 0


def test_cache_bytes():
    assert get_spec("qwen3-4b").kv_bytes_per_token() == 2 * 36 * 8 * 128 * 2
    assert get_spec("deepseek-v3").kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert get_spec("deepseek-v3").kv_bytes_per_token("float8") == 61 * (512 + 64)
    assert get_spec("glm-5").kv_bytes_per_token() == 78 * (512 + 64 + 128) * 2
    assert get_spec("glm-5.2").kv_bytes_per_token() == (78 * 576 + 21 * 128) * 2
    hybrid = get_spec("qwen3-next-80b-a3b-instruct")
    assert hybrid.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    assert hybrid.state_bytes() == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert get_spec("qwen3-4b").state_bytes() == 0


def test_flops():
    dense = get_spec("qwen3-4b")
    assert dense.flops_per_token(0) == pytest.approx(2 * dense.params, rel=1e-3)
    assert dense.flops_per_token(100, backward=True) == 3 * (dense.flops_per_token(0) + 4 * 36 * 32 * 128 * 100)
    sparse = get_spec("qwen3-30b-a3b")
    assert sparse.matmul_params == pytest.approx(sparse.active_params - sparse.vocab * sparse.hidden, rel=1e-3)
    latent = get_spec("deepseek-v3")
    assert latent.flops_per_token(10) - latent.flops_per_token(0) == 61 * 2 * 128 * (192 + 128) * 10
    indexed = get_spec("glm-5.2")
    assert indexed.flops_per_token(4096) - indexed.flops_per_token(2048) == 21 * 2 * 32 * 128 * 2048
    hybrid = get_spec("qwen3.5-27b")
    assert hybrid.flops_per_token(7) - hybrid.flops_per_token(0) == 16 * 4 * 24 * 256 * 7
    state = 48 * (7 * 48 * 128 * 128 + 2 * (2 * 16 * 128 + 48 * 128) * 4)
    assert hybrid.flops_per_token(0) == 2 * hybrid.matmul_params + state


def test_indexer_layers_are_those_of_glm52():
    spec = get_spec("glm-5.2")
    computing = [i + 1 for i in range(spec.layers) if spec.indexer.computes(i)]
    assert computing == [1, 2, 3, *range(7, 76, 4)]
    assert counts.index_layers(get_spec("glm-5")) == 78


def test_other_numbers():
    assert get_spec("qwen3-4b").weight_bytes("float32") == 4 * get_spec("qwen3-4b").params
    assert get_spec("quickstart").params == 167_200
    assert get_spec("qwen3-30b-a3b").activation_width == 12 * 2048 + 4 * 8 * 768
    assert get_spec("qwen3-4b").activation_width == 12 * 2560 + 4 * 9728
    assert get_spec("llama3.2-3b").padded_vocab() == 128_256 and get_spec("qwen3.5-4b").padded_vocab(256) == 248_320
