"""The weight map of every family: complete, byte-exact there and back, under the names that Megatron has."""

import dataclasses
import math
import shutil
from collections import defaultdict

import pytest
import torch

from slimecli.model_specs import families, registry
from slimecli.weights.check import spec_of
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import hf_shapes, objects_of, rules_of
from slimecli.weights.torch_dist import TorchDist
from tests.models import FAMILIES, spec_at

FORMS = ["transformers", "hub"]


def test_every_family_of_the_registry_has_a_tiny_model(folder):
    covered = {spec_at(folder(family)).family.model_type for family in FAMILIES}
    assert covered | {"qwen3_5_text", "qwen3_5_moe_text"} == set(families())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_map_has_every_tensor_once_in_its_shape(folder, family, form):
    opened = HfFolder(folder(family, form))
    rules = rules_of(spec_at(opened.path), 384, opened.shapes)
    names = [name for rule in rules for name in rule.hf]
    assert len(names) == len(set(names))
    assert {n: s for rule in rules for n, s in rule.hf.items()} == opened.shapes
    assert_tiled(rules)


DISTINCT = {(s.family.model_type, s.layers, s.params, s.mtp_params): name for name, s in registry().items()}
"""one registry name of every shape"""


@pytest.mark.parametrize("name", DISTINCT.values())
def test_map_of_a_registry_entry_has_its_parameters(name):
    """Counted from the rules, against the formulas of model_specs; correction biases are no parameters there."""
    spec = registry()[name]
    rules = rules_of(spec, spec.padded_vocab())
    sizes = {n: math.prod(shape) for rule in rules for n, shape in rule.hf.items()}
    assert len(sizes) == sum(len(rule.hf) for rule in rules)
    parameters = sum(size for n, size in sizes.items() if not n.endswith("e_score_correction_bias"))
    assert parameters == spec.params + spec.mtp_params
    plain = sum(math.prod(shape) for shape in hf_shapes(dataclasses.replace(spec, mtp=0)).values())
    biases = sum(size for n, size in sizes.items() if n.endswith("bias") and "correction" in n)
    assert 0 <= plain - spec.params <= biases
    assert_tiled(rules)


def assert_tiled(rules):
    """Chunks of a Megatron tensor lie inside it, and their sizes add up to it (disjoint: see test_rules)."""
    found = defaultdict(list)
    for rule in rules:
        ends = [a + n for a, n in zip(rule.offset, rule.chunk, strict=True)]
        assert all(end <= size for end, size in zip(ends, rule.full, strict=True)), rule
        found[rule.key, rule.full].append(rule.offset)
        assert rule.chunk == rule.full or math.prod(rule.chunk) < math.prod(rule.full)
    assert len({key for key, _ in found}) == len(found), "one key, two global shapes"
    totals = defaultdict(int)
    for rule in rules:
        totals[rule.key] += math.prod(rule.chunk)
    for (key, full), offsets in found.items():
        assert len(set(offsets)) == len(offsets), key
        assert totals[key] == math.prod(full), key


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_byte_identical(folder, family, form, tmp_path):
    hf = folder(family, form)
    hf_to_torch_dist(hf, tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    before, after = HfFolder(hf), HfFolder(tmp_path / "back")
    assert before.names == after.names
    for name in before.names:
        assert before.dtypes[name] == after.dtypes[name], name
        assert torch.equal(before.read(name).view(torch.uint8), after.read(name).view(torch.uint8)), name


def test_without_a_certificate_experts_come_back_as_the_hub_has_them(folder, tmp_path):
    hf = folder("qwen3_5_moe", "transformers")
    hf_to_torch_dist(hf, tmp_path / "td")
    (tmp_path / "td" / "certificate.json").unlink()
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    before, after = HfFolder(hf), HfFolder(tmp_path / "back")
    prefix = "model.language_model.layers.1.mlp.experts."
    both = after.read(f"{prefix}gate_up_proj")
    assert torch.equal(both[2, 24:], before.read(f"{prefix}2.up_proj.weight"))
    assert f"{prefix}2.up_proj.weight" not in after.names


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "minimax_m2"])
def test_transformers_own_names_are_read_too(folder, family, tmp_path):
    """`save_original_format=False`: experts stacked, under the names of transformers' modules."""
    from transformers import AutoModelForCausalLM

    hf, own = folder(family, "transformers"), tmp_path / "own"
    shutil.copytree(hf, own)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    model.save_pretrained(own, save_original_format=False)
    stacked = HfFolder(own)
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight"} <= set(stacked.names)
    for source, name in ((hf, "td"), (own, "td-own")):
        hf_to_torch_dist(source, tmp_path / name)
    first, second = TorchDist(tmp_path / "td"), TorchDist(tmp_path / "td-own")
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(full(first, key), full(second, key)) for key in first.tensors)
    torch_dist_to_hf(tmp_path / "td-own", tmp_path / "back")
    back = HfFolder(tmp_path / "back")
    assert back.shapes == stacked.shapes
    assert all(torch.equal(back.read(name), stacked.read(name)) for name in stacked.names)


def full(td, key):
    shape = td.shape(key)
    return td.read(key, (0,) * len(shape), shape)


@pytest.fixture
def converted(folder, tmp_path):
    """family -> (HF tensors, checkpoint)."""

    def convert(family):
        hf = folder(family)
        hf_to_torch_dist(hf, tmp_path / "td")
        return HfFolder(hf), TorchDist(tmp_path / "td")

    return convert


def test_expert_tensors_are_stacked_with_gate_above_up(converted):
    for family, expert, names in (
        ("deepseek_v3", "model.layers.1.mlp.experts.{}.{}.weight", ("gate_proj", "up_proj", "down_proj")),
        ("minimax_m2", "model.layers.1.block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
        ("qwen2_moe", "model.layers.1.mlp.experts.{}.{}.weight", ("gate_proj", "up_proj", "down_proj")),
    ):
        hf, td = converted(family)
        fc1 = full(td, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight")
        fc2 = full(td, "decoder.layers.1.mlp.experts.experts.linear_fc2.weight")
        for e in range(4):
            gate, up, down = (hf.read(expert.format(e, name)) for name in names)
            assert torch.equal(fc1[e], torch.cat([gate, up]))
            assert torch.equal(fc2[e], down)
        shutil.rmtree(td.path.parent)


def test_router_bias_stays_float32(converted):
    hf, td = converted("glm4_moe")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    bias = full(td, "decoder.layers.2.mlp.router.expert_bias")
    assert bias.dtype == torch.float32 and torch.equal(bias, hf.read(name))
    kept = {n for rule in rules_of(spec_of(hf)) if rule.keep_dtype for n in rule.hf}
    assert kept == {n for n in hf.names if n.endswith("correction_bias")}


def test_gated_attention_has_queries_before_gates(converted):
    """4 heads of 16 in 2 groups; HF's q_proj is 16 rows of query, 16 of gate per head."""
    hf, td = converted("qwen3_next")
    qkv = full(td, "decoder.layers.3.self_attention.linear_qkv.weight")
    q, k, v = (hf.read(f"model.layers.3.self_attn.{x}_proj.weight") for x in "qkv")
    wanted = []
    for g in range(2):
        heads = q[g * 64 : (g + 1) * 64].reshape(2, 32, -1)
        wanted += [heads[0, :16], heads[1, :16], heads[0, 16:], heads[1, 16:]]
        wanted += [k[g * 16 : (g + 1) * 16], v[g * 16 : (g + 1) * 16]]
    assert torch.equal(qkv, torch.cat(wanted))


def test_indexer_has_rotary_rows_last(converted):
    hf, td = converted("glm_moe_dsa")
    prefix = "model.layers.0.self_attn.indexer."
    for name, heads in (("wq_b.weight", 2), ("wk.weight", 1), ("k_norm.weight", 1), ("k_norm.bias", 1)):
        before, after = hf.read(prefix + name), full(td, f"decoder.layers.0.self_attention.{name}")
        for h in range(heads):
            block = before[h * 24 : (h + 1) * 24]
            assert torch.equal(after[h * 24 : (h + 1) * 24], torch.cat([block[8:], block[:8]])), name
    assert "decoder.layers.2.self_attention.wk.weight" not in td.tensors, "a layer that reuses indices has no indexer"


PROJECTIONS = {
    "mimo": ("model.mtp_layers.0.input_proj.weight", True),
    "qwen3_next": ("mtp.fc.weight", True),
    "qwen3_5": ("mtp.fc.weight", False),
    "deepseek_v3": ("model.layers.3.eh_proj.weight", False),
}


@pytest.mark.parametrize("family", PROJECTIONS)
def test_halves_of_the_prediction_projection(converted, family):
    name, swapped = PROJECTIONS[family]
    hf, td = converted(family)
    before, after = hf.read(name), full(td, "mtp.layers.0.eh_proj.weight")
    assert torch.equal(after, torch.cat([before[:, 64:], before[:, :64]], dim=1) if swapped else before)


KEYS = {
    "deepseek_v3": {
        "decoder.layers.0.input_layernorm.weight": (64,),
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": (24, 64),
        "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight": (24,),
        "decoder.layers.0.self_attention.linear_q_up_proj.weight": (96, 24),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (28, 64),
        "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight": (20,),
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight": (112, 20),
        "decoder.layers.0.self_attention.linear_proj.weight": (64, 48),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (64,),
        "decoder.layers.0.mlp.linear_fc1.weight": (384, 64),
        "decoder.layers.1.pre_mlp_layernorm.weight": (64,),
        "decoder.layers.1.mlp.router.weight": (4, 64),
        "decoder.layers.1.mlp.router.expert_bias": (4,),
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (4, 48, 64),
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (4, 64, 24),
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (48, 64),
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": (64, 24),
        "mtp.layers.0.enorm.weight": (64,),
        "mtp.layers.0.hnorm.weight": (64,),
        "mtp.layers.0.eh_proj.weight": (64, 128),
        "mtp.layers.0.final_layernorm.weight": (64,),
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight": (4, 48, 64),
        "output_layer.weight": (384, 64),
        "decoder.final_layernorm.weight": (64,),
    },
    "moonlight": {"decoder.layers.0.self_attention.linear_q_proj.weight": (96, 64)},
    "glm4": {
        "decoder.layers.0.post_self_attn_layernorm.weight": (64,),
        "decoder.layers.0.post_mlp_layernorm.weight": (64,),
        "decoder.layers.0.self_attention.linear_qkv.bias": (128,),
        "decoder.layers.0.mlp.linear_fc1.weight": (384, 64),
    },
    "minimax_m2": {
        "decoder.layers.0.self_attention.q_norm.weight": (64,),
        "decoder.layers.0.self_attention.k_norm.weight": (32,),
    },
    "mixtral": {
        "decoder.layers.0.self_attention.linear_qkv.weight": (128, 64),
        "decoder.layers.0.mlp.router.weight": (4, 64),
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": (4, 384, 64),
        "decoder.layers.0.mlp.experts.experts.linear_fc2.weight": (4, 64, 192),
    },
    "qwen2_moe": {
        "decoder.layers.0.self_attention.linear_qkv.bias": (128,),
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": (4, 48, 64),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": (80, 64),
        "decoder.layers.0.mlp.shared_experts.gate_weight": (1, 64),
    },
    "qwen3_5_moe": {
        "decoder.layers.0.self_attention.input_layernorm.weight": (64,),
        "decoder.layers.0.self_attention.linear_attn.in_proj_qkv.weight": (80, 64),
        "decoder.layers.0.self_attention.linear_attn.conv1d.weight": (80, 1, 4),
        "decoder.layers.0.mlp.shared_experts.gate_weight": (1, 64),
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": (64,),
        "decoder.layers.3.self_attention.linear_qkv.weight": (192, 64),
        "model.visual.patch_embed.proj.bias": (16,),
    },
    "qwen3_next": {
        "decoder.layers.0.self_attention.linear_attn.in_proj_qkvz.weight": (128, 64),
        "decoder.layers.0.self_attention.linear_attn.in_proj_ba.weight": (8, 64),
    },
}


@pytest.mark.parametrize("family", KEYS)
def test_megatron_names_and_global_shapes(folder, family):
    opened = HfFolder(folder(family))
    found = {rule.key: rule.full for rule in rules_of(spec_at(opened.path), 384, opened.shapes)}
    assert {key: found.get(key) for key in KEYS[family]} == KEYS[family]


def test_every_stateful_module_has_its_object(folder):
    opened = HfFolder(folder("deepseek_v3"))
    rules = rules_of(spec_at(opened.path), 384, opened.shapes)
    objects = objects_of(rules)
    assert len(objects) == len(set(objects))
    for module in (
        "decoder.layers.0.self_attention.linear_q_down_proj",
        "decoder.layers.0.self_attention.core_attention",
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.2.mlp.shared_experts.linear_fc2",
        "decoder.final_layernorm",
        "mtp.layers.0.eh_proj",
        "mtp.layers.0.transformer_layer.self_attention.linear_proj",
    ):
        assert f"{module}._extra_state/shard_0_1" in objects
    experts = "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1._extra_state/shard_{}_4"
    assert {experts.format(e) for e in range(4)} <= set(objects)
    assert not [o for o in objects if o.startswith(("embedding", "output_layer", "model."))]
