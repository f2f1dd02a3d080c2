"""Faults of a folder that headers and config can tell are told, by the name of the tensor, in every kind of family."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimecli.errors import DataError
from slimecli.model_specs import get_spec, registry
from slimecli.weights.check import check_folder, weight_problems
from slimecli.weights.hf import TensorEntry
from slimecli.weights.maps import hf_shapes
from tests.models import as_on_the_hub, edit_json, tiny_model, tiny_tokenizer

VICTIMS = {
    "qwen2": "model.layers.1.mlp.up_proj.weight",
    "glm4": "model.layers.1.mlp.gate_up_proj.weight",
    "deepseek_v3": "model.layers.2.mlp.experts.3.up_proj.weight",
    "minimax_m2": "model.layers.2.block_sparse_moe.experts.1.w2.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w3.weight",
    "qwen2_moe": "model.layers.2.mlp.shared_expert.down_proj.weight",
    "glm_moe_dsa": "model.layers.1.self_attn.indexer.wq_b.weight",
    "qwen3_5_moe": "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    "qwen3_next": "mtp.layers.0.mlp.experts.2.down_proj.weight",
}
"""family -> a matrix of it that is not square"""


@pytest.fixture(params=VICTIMS)
def victim(request, tmp_path):
    """(folder, name of one of its tensors)."""
    return as_on_the_hub(tiny_model(tmp_path / "m", request.param), request.param), VICTIMS[request.param]


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def refused(folder):
    with pytest.raises(DataError) as caught:
        check_folder(folder)
    return caught.value.what


def test_a_whole_model_is_accepted(victim):
    assert check_folder(victim[0]) is not None


def test_dropped(victim):
    folder, name = victim
    change(folder, lambda w: w.pop(name))
    assert refused(folder).endswith(f": missing {name}")


def test_renamed(victim):
    folder, name = victim
    change(folder, lambda w: w.update({f"{name}.old": w.pop(name)}))
    what = refused(folder)
    assert f"missing {name} (renamed to {name}.old?)" in what and "not part of a " in what


def test_transposed(victim):
    folder, name = victim
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    change(folder, lambda w: w.update({name: w[name].t().contiguous()}))
    assert refused(folder).endswith(f"{name} has shape {shape[::-1]} (transposed), expected {shape}")


def test_wrong_shape(victim):
    folder, name = victim
    rows, cols = load_file(folder / "model.safetensors")[name].shape
    change(folder, lambda w: w.update({name: w[name][:-1].contiguous()}))
    assert refused(folder).endswith(f"{name} has shape {[rows - 1, cols]}, expected {[rows, cols]}")


def test_in_two_shards(victim):
    folder, name = victim
    save_file({name: load_file(folder / "model.safetensors")[name]}, folder / "more.safetensors")
    assert f"tensor {name} is in both" in refused(folder)


def test_truncated_and_damaged(victim):
    folder, _ = victim
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    assert "its header tells of" in refused(folder)
    length = struct.unpack("<Q", data[:8])[0]
    (folder / "model.safetensors").write_bytes(data[:8] + b"\xff" * length + data[8 + length :])
    assert "damaged safetensors header" in refused(folder)


def test_swapped_within_a_layer(tmp_path):
    folder = tiny_model(tmp_path / "m", "moonlight")
    up, down = (f"model.layers.0.mlp.{x}_proj.weight" for x in ("up", "down"))
    change(folder, lambda w: w.update({up: w[down], down: w[up]}))
    what = refused(folder)
    assert f"{up} [64, 192] and {down} [192, 64] are swapped, or both transposed" in what or (
        f"{down} [192, 64] and {up} [64, 192] are swapped, or both transposed" in what
    )


def test_swapped_across_layers_where_shapes_differ(tmp_path):
    """A dense and a routed layer: each tensor is where the other one's kind is wanted."""
    folder = tiny_model(tmp_path / "m", "kimi_k2")

    def swap(weights):
        for x in ("gate", "up", "down"):
            for part in ("mlp", "mlp.shared_experts"):
                layer = 1 if part == "mlp" else 0
                weights[f"model.layers.{layer}.{part}.{x}_proj.weight"] = weights.pop(
                    f"model.layers.{1 - layer}.{part}.{x}_proj.weight"
                )

    change(folder, swap)
    what = refused(folder)
    assert "model.layers.0.mlp.gate_proj.weight" in what and "model.layers.1.mlp.gate_proj.weight" in what


def test_tokenizer_of_another_model(tmp_path):
    folder = tiny_model(tmp_path / "m", "qwen3", vocab=290)
    assert check_folder(folder) is not None
    size = len(tiny_tokenizer(folder, 300))
    assert refused(folder).endswith(f"tokenizer.json has ids up to {size - 1}, the embedding has 290 rows")


def test_embedding_of_another_vocabulary(tmp_path):
    folder = tiny_model(tmp_path / "m", "glm4")
    edit_json(folder / "config.json", vocab_size=320)
    what = refused(folder)
    assert "model.embed_tokens.weight has shape [300, 64], expected [320, 64]" in what
    assert "lm_head.weight has shape [300, 64]" in what


def test_expert_count_of_another_model(tmp_path):
    folder = tiny_model(tmp_path / "m", "qwen3_moe")
    edit_json(folder / "config.json", num_experts=5, num_local_experts=5)
    what = refused(folder)
    assert "missing model.layers.0.mlp.experts.4.gate_proj.weight" in what
    assert "model.layers.0.mlp.gate.weight has shape [4, 64], expected [5, 64]" in what


def test_a_long_list_is_cut(tmp_path):
    folder = tiny_model(tmp_path / "m", "qwen3_moe")
    change(folder, lambda w: w.update({n: t.t().contiguous() for n, t in w.items() if "up_proj" in n}))
    what = refused(folder)
    assert what.count("(transposed)") == 8 and what.endswith("and 4 more")


class Headers:
    """A folder that has headers only: a model of any size."""

    def __init__(self, shapes):
        self.entries = {n: TensorEntry(None, 0, math.prod(s) * 2, torch.bfloat16, s) for n, s in shapes.items()}

    names = property(lambda self: sorted(self.entries))
    shapes = property(lambda self: {n: e.shape for n, e in self.entries.items()})


@pytest.mark.parametrize("name", ["kimi-k2-instruct", "deepseek-v3", "qwen3.5-35b-a3b"])
def test_a_wrong_tensor_among_tens_of_thousands(name):
    spec = get_spec(name)
    shapes = hf_shapes(spec)
    assert weight_problems(Headers(shapes), spec) == []
    last = max(n for n in shapes if n.endswith("down_proj.weight") or n.endswith("experts.down_proj"))
    lost = shapes.pop(last)
    assert weight_problems(Headers(shapes), spec) == [f"missing {last}"]
    wrong = {**shapes, last: lost[::-1]}
    assert weight_problems(Headers(wrong), spec) == [
        f"{last} has shape {list(lost[::-1])} (transposed), expected {list(lost)}"
    ]


def test_config_of_another_registry_entry_is_told_by_field(tmp_path):
    folder = tiny_model(tmp_path / "m", "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    assert config["kv_lora_rank"] == 20
    with pytest.raises(DataError, match="is not deepseek-v3: .*kv_rank") as caught:
        check_folder(folder, registry()["deepseek-v3"])
    assert "experts: spec 256, config 4" in caught.value.what
