"""A whole model with experts in int4, as Kimi-K2-Thinking comes: checked, exported, converted there and back."""

import pytest
import torch

from slimecli import files
from slimecli.weights.check import check_folder
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.export import export_weights
from slimecli.weights.hf import HfFolder, save_hf_folder
from slimecli.weights.origin import hf_origin
from tests.models import tiny_model
from tests.weights.test_quant import INT4


def packed(weight):
    """(weight_packed, weight_scale, what they stand for) in groups of 32."""
    rows, cols = weight.shape
    groups = weight.float().view(rows, cols // 32, 32)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    nibbles = (values.to(torch.int64) + 8).view(rows, cols // 8, 8)
    words = sum(nibbles[..., i] << 4 * i for i in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words, scale, (values * scale.float()[..., None]).view(rows, cols).bfloat16()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(int4 folder, name -> tensor of the model it stands for)."""
    root = tmp_path_factory.mktemp("int4")
    source = tiny_model(root / "m", "kimi_k2", dtype="bfloat16", moe_intermediate_size=32)
    stored, expected = {}, {}
    for name, tensor in HfFolder(source).iterate():
        expected[name] = tensor
        if ".mlp.experts." not in name:
            stored[name] = tensor
            continue
        words, scale, expected[name] = packed(tensor)
        shape = torch.tensor(tensor.shape, dtype=torch.int32)
        stored |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
    save_hf_folder(iter(stored.items()), root / "q", like=source)
    config = files.read_json(source / "config.json")
    files.write_json(root / "q" / "config.json", {**config, "quantization_config": INT4})
    assert sum(n.endswith("weight_packed") for n in stored) == 2 * 4 * 3
    return root / "q", expected


def equal(folder, expected):
    found = HfFolder(folder)
    assert found.names == sorted(expected) and "quantization_config" not in found.config()
    assert all(torch.equal(found.read(n), t) for n, t in expected.items())


def test_it_is_the_model_it_says(models):
    spec = check_folder(models[0])
    assert spec is not None and spec.family.model_type == "kimi_k2"


def test_exported_it_is_an_ordinary_one(models, tmp_path):
    folder, expected = models
    export_weights(hf_origin(folder), tmp_path / "o", card=lambda notes: "")
    equal(tmp_path / "o", expected)


def test_there_and_back(models, tmp_path):
    folder, expected = models
    assert hf_to_torch_dist(folder, tmp_path / "t", jobs=1)["verified"]
    torch_dist_to_hf(tmp_path / "t", tmp_path / "o", jobs=1)
    equal(tmp_path / "o", expected)
