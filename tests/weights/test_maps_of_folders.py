"""Weight maps follow what a folder or checkpoint really has: prediction layers, copies, names, a model saved alone."""

import dataclasses
import shutil
import time

import pytest
import torch

from slimecli.errors import DataError
from slimecli.model_specs import registry
from slimecli.weights.check import check_folder
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import fit, hf_shapes, objects_of, rules_of, stored_in
from slimecli.weights.torch_dist import TorchDist
from tests.models import edit_json, spec_at, tiny_model


def test_prediction_layers_are_all_there_or_none(folder, tmp_path):
    hf = folder("glm4_moe", "transformers")
    assert spec_at(hf).mtp == 1 and check_folder(hf).mtp == 0
    assert check_folder(folder("glm4_moe")).mtp == 1
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(folder("glm4_moe"), broken)
    weights = load_file(broken / "model.safetensors")
    weights.pop("model.layers.3.eh_proj.weight")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"missing model\.layers\.3\.eh_proj\.weight"):
        check_folder(broken)


def test_copies_of_embedding_and_head_may_be_left_out(folder):
    opened = HfFolder(folder("deepseek_v3"))
    spec, copies = (
        spec_at(opened.path),
        {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"},
    )
    assert copies <= set(opened.names) and not copies & set(hf_shapes(spec))
    without = {n: s for n, s in opened.shapes.items() if n not in copies}
    assert hf_shapes(spec, without) == without


def test_checkpoint_without_prediction_layers(folder):
    """As Megatron saves a model that was trained without them, whatever config.json says."""
    spec = spec_at(folder("deepseek_v3"))
    tensors = {rule.key: rule.full for rule in rules_of(dataclasses.replace(spec, mtp=0))}
    assert fit(spec, tensors).mtp == 0
    assert fit(spec, {rule.key: rule.full for rule in rules_of(spec)}).mtp == 1
    stored = stored_in(tensors, ["model.layers.3.mlp.experts.0.gate_proj.weight"])
    assert not [r for r in rules_of(spec, 0, stored) if r.key.startswith("mtp.")]


def test_more_prediction_layers_than_the_family_has_names_for(folder):
    spec = spec_at(folder("qwen3_next"))
    with pytest.raises(DataError, match="2 prediction layer"):
        rules_of(dataclasses.replace(spec, mtp=2))
    assert len(rules_of(dataclasses.replace(spec_at(folder("deepseek_v3")), mtp=2)))


@pytest.mark.parametrize("taken_out", [True, False])
def test_language_model_saved_alone(folder, tmp_path, taken_out):
    """transformers' causal-LM class of qwen3.5: no vision, its own model_type, and the prefix it was loaded with."""
    from transformers import AutoModelForCausalLM

    hf = folder("qwen3_5", "transformers")
    model = AutoModelForCausalLM.from_pretrained(hf)
    if not taken_out:
        model = AutoModelForCausalLM.from_config(model.config)
    model.save_pretrained(tmp_path / "text")
    alone = HfFolder(tmp_path / "text")
    assert alone.config()["model_type"] == "qwen3_5_text"
    prefix = "model.language_model." if taken_out else "model."
    assert f"{prefix}norm.weight" in alone.names and not [n for n in alone.names if "visual" in n]
    hf_to_torch_dist(tmp_path / "text", tmp_path / "td")
    key = "decoder.layers.1.self_attention.linear_attn.in_proj_z.weight"
    stored, shape = TorchDist(tmp_path / "td"), TorchDist(tmp_path / "td").shape(key)
    assert torch.equal(
        stored.read(key, (0,) * len(shape), shape), alone.read(f"{prefix}layers.1.linear_attn.in_proj_z.weight")
    )
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    assert HfFolder(tmp_path / "back").shapes == alone.shapes


def test_output_layer_of_a_tied_model_is_its_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    hf = tiny_model(tmp_path / "hf", "qwen3_5", tie_word_embeddings=True)
    weights = load_file(hf / "model.safetensors")
    assert "lm_head.weight" not in weights
    table = weights["model.language_model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": table.clone()}, hf / "model.safetensors", {"format": "pt"})
    hf_to_torch_dist(hf, tmp_path / "td")
    assert "output_layer.weight" not in TorchDist(tmp_path / "td").tensors
    save_file({**weights, "lm_head.weight": table + 1}, hf / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lm_head\.weight differs"):
        hf_to_torch_dist(hf, tmp_path / "no")


def test_unknown_layout_is_told(folder):
    spec = spec_at(folder("qwen3"))
    spec = dataclasses.replace(spec, family=dataclasses.replace(spec.family, layout="new"))
    with pytest.raises(DataError, match="no weight map for layout 'new'"):
        rules_of(spec)


def test_largest_model_is_mapped_at_once():
    spec = registry()["kimi-k2-instruct"]
    begin = time.process_time()
    rules = rules_of(spec, spec.padded_vocab())
    assert len(rules) > 69_000 and len(objects_of(rules)) > 46_000
    assert time.process_time() - begin < 2


def test_number_of_layers_in_config_must_be_that_of_the_weights(folder, tmp_path):
    shutil.copytree(folder("kimi_k2"), tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", num_hidden_layers=2)
    with pytest.raises(DataError, match=r"not part of a kimi_k2 model: model\.layers\.2\."):
        check_folder(tmp_path / "m")
