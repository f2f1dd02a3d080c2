"""Quantised folders read as ordinary ones: against arithmetic written out element by element."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from slimecli.errors import DataError
from slimecli.weights import quant
from slimecli.weights.hf import HfFolder
from slimecli.weights.quant import Dequantized, open_weights
from slimecli.weights.quant_scheme import Scheme, plain_config, scheme_of, with_dtype

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
"""as Kimi-K2-Thinking has it"""


def folder(path, tensors, quantization, **config):
    path.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    stated = {"quantization_config": quantization} if quantization else {}
    (path / "config.json").write_text(json.dumps({"model_type": "x", **config, **stated}))
    return path


def every_block(weight, scale, high, wide):
    """The definition, block by block."""
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            where = slice(r * high, (r + 1) * high), slice(c * wide, (c + 1) * wide)
            out[where] = (weight[where].float() * scale[r, c].float()).bfloat16()
    return out


def fp8_pair(rows, cols, seed=0, high=128, wide=128):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    weight[weight & 127 == 127] = 0  # the two NaN of e4m3
    scale = torch.rand(-(-rows // high), -(-cols // wide), generator=generator) * 1e-3
    return weight.view(E4M3), scale


def test_fp8_blocks_of_any_shape_are_values_times_scales(tmp_path):
    choose = random.Random(3)
    shapes = [(128, 128), (1, 1), (256, 384), (130, 5), (127, 129)]
    shapes += [(choose.randint(1, 400), choose.randint(1, 400)) for _ in range(12)]
    pairs = {f"w{i}.weight": fp8_pair(r, c, i) for i, (r, c) in enumerate(shapes)}
    tensors = {n: w for n, (w, _) in pairs.items()} | {f"{n}_scale_inv": s for n, (_, s) in pairs.items()}
    tensors["norm.weight"] = torch.randn(7)
    opened = open_weights(folder(tmp_path / "m", tensors, FP8))
    assert opened.names == sorted([*pairs, "norm.weight"])
    for name, (weight, scale) in pairs.items():
        expected = every_block(weight, scale, 128, 128)
        assert torch.equal(opened.read(name), expected), name
        entry = opened.entries[name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (torch.bfloat16, expected.shape, expected.nbytes)
        for _ in range(4):
            start = choose.randint(0, expected.shape[0])
            stop = choose.randint(start, expected.shape[0])
            assert torch.equal(opened.read_rows(name, start, stop), expected[start:stop])
    assert torch.equal(opened.read("norm.weight"), tensors["norm.weight"])
    assert torch.equal(opened.read_rows("norm.weight", 2, 5), tensors["norm.weight"][2:5])
    assert opened.nbytes == sum(e.nbytes for e in opened.entries.values())
    assert {n for n, _ in opened.iterate()} == set(opened.names)


def test_a_large_tensor_is_read_in_slabs(tmp_path, monkeypatch):
    weight, scale = fp8_pair(300, 260)
    path = folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale}, FP8)
    monkeypatch.setattr(quant, "SLAB", 1000)
    assert torch.equal(open_weights(path).read("a.weight"), every_block(weight, scale, 128, 128))


def test_hand_computed_fp8(tmp_path):
    weight = torch.tensor([[1.0, -448.0], [0.875, 2.0**-9]]).to(E4M3)
    opened = open_weights(
        folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": torch.tensor([[0.5]])}, FP8)
    )
    assert opened.read("a.weight").tolist() == [[0.5, -224.0], [0.4375, 2.0**-10]]


def test_stacked_experts_have_scales_per_expert(tmp_path):
    parts = [fp8_pair(130, 200, seed) for seed in range(3)]
    weight = torch.stack([w.view(torch.uint8) for w, _ in parts]).view(E4M3)
    tensors = {"e.down_proj": weight, "e.down_proj_scale_inv": torch.stack([s for _, s in parts])}
    opened = open_weights(folder(tmp_path / "m", tensors, FP8))
    expected = torch.stack([every_block(w, s, 128, 128) for w, s in parts])
    assert torch.equal(opened.read("e.down_proj"), expected)
    assert torch.equal(opened.read_rows("e.down_proj", 1, 3), expected[1:3])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (33, 1), (33,)])
def test_scales_per_tensor_and_per_row(shape, tmp_path):
    weight, _ = fp8_pair(33, 20)
    scale = torch.rand(shape) * 0.01
    no_blocks = {k: v for k, v in FP8.items() if k != "weight_block_size"}
    opened = open_weights(folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale": scale}, no_blocks))
    factor = scale.reshape(-1, 1)
    assert torch.equal(opened.read("a.weight"), (weight.float() * factor).bfloat16())
    assert torch.equal(opened.read_rows("a.weight", 5, 9), (weight.float() * factor).bfloat16()[5:9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_in_other_dtypes(dtype, tmp_path):
    weight, scale = fp8_pair(130, 130)
    scale = torch.exp2(torch.floor(torch.log2(scale))).to(dtype)
    opened = open_weights(folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale}, FP8))
    assert torch.equal(opened.read("a.weight"), every_block(weight, scale, 128, 128))


def pack_by_hand(values):
    """[rows, cols] of -8..7 -> [rows, cols/8] int32, the lowest bits first."""
    rows, cols = values.shape
    words = [
        [sum((values[r, 8 * w + i].item() + 8) << 4 * i for i in range(8)) for w in range(cols // 8)]
        for r in range(rows)
    ]
    return torch.tensor([[x - (1 << 32) if x >= 1 << 31 else x for x in row] for row in words], dtype=torch.int32)


def int4_tensors(rows=5, cols=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (rows, cols), generator=generator)
    scale = (torch.rand(rows, cols // 32, generator=generator) * 0.1).bfloat16()
    tensors = {
        "x.weight_packed": pack_by_hand(values),
        "x.weight_scale": scale,
        "x.weight_shape": torch.tensor([rows, cols], dtype=torch.int32),
        "lm_head.weight": torch.randn(4, 4).bfloat16(),
    }
    return tensors, (values.float() * scale.float().repeat_interleave(32, 1)).bfloat16()


def test_int4_packed_by_hand_reads_back(tmp_path):
    tensors, expected = int4_tensors()
    opened = open_weights(folder(tmp_path / "m", tensors, INT4))
    assert opened.names == ["lm_head.weight", "x.weight"] and opened.shapes["x.weight"] == (5, 96)
    assert torch.equal(opened.read("x.weight"), expected)
    assert torch.equal(opened.read_rows("x.weight", 1, 4), expected[1:4])
    assert opened.dtypes["x.weight"] == torch.bfloat16
    word = pack_by_hand(torch.tensor([[-8, -7, 0, 7, 1, -1, 2, -2]]))
    assert word.item() & 0xFFFFFFFF == 0x6A79F810


def test_plain_folders_stay_what_they_are(tmp_path):
    opened = open_weights(folder(tmp_path / "m", {"a.weight": torch.randn(3, 3)}, None))
    assert type(opened) is HfFolder


def test_nested_config_and_its_plain_form(tmp_path):
    config = {"model_type": "m", "text_config": {"hidden_size": 4, "quantization_config": FP8}}
    assert scheme_of(config) == Scheme("fp8", (128, 128))
    assert plain_config(config) == {"model_type": "m", "text_config": {"hidden_size": 4}}
    weight, scale = fp8_pair(4, 4)
    path = folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale}, None, **config)
    assert "quantization_config" not in json.dumps(open_weights(path).config())


def test_a_dtype_is_stated_once():
    config = {"dtype": "float32", "a": 1, "text_config": {"torch_dtype": "float32", "b": 2}}
    assert with_dtype(config, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "a": 1,
        "text_config": {"torch_dtype": "bfloat16", "b": 2},
    }
    assert with_dtype({"text_config": {"b": 2}}, "float16")["text_config"] == {"b": 2}


def test_activation_scales_are_no_weights(tmp_path):
    weight, scale = fp8_pair(4, 4)
    tensors = {
        "a.weight": weight,
        "a.weight_scale_inv": scale,
        "a.input_scale": torch.ones(1),
        "k_proj.k_scale": torch.ones(()),
    }
    assert open_weights(folder(tmp_path / "m", tensors, FP8)).names == ["a.weight"]


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**INT4, "config_groups": {}}, "0 ways"),
        ({**INT4, "format": "marlin-24"}, "compressed-tensors marlin-24: 4-bit int per group"),
    ],
)
def test_other_schemes_are_refused_by_name(quantization, said, tmp_path):
    with pytest.raises(DataError) as caught:
        open_weights(folder(tmp_path / "m", {"a.weight": torch.zeros(1)}, quantization))
    assert said in caught.value.what and "slime reads fp8 e4m3" in caught.value.fix


def test_asymmetric_int4_is_refused():
    changed = json.loads(json.dumps(INT4))
    changed["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(DataError, match="asymmetric"):
        scheme_of({"quantization_config": changed})


def test_float_quantized_compressed_tensors_is_fp8_per_row():
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    assert scheme_of({"quantization_config": stated}) == Scheme("fp8", None)


def broken(change, quantization=FP8):
    weight, scale = fp8_pair(130, 130)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    if quantization is INT4:
        tensors, _ = int4_tensors()
    change(tensors)
    return tensors, quantization


CASES = {
    "lacks its a.weight_scale_inv": broken(lambda t: t.pop("a.weight_scale_inv")),
    "scale without its quantised weight: a.weight_scale_inv": broken(
        lambda t: t.update(
            {"a.weight": torch.zeros(130, 130), "b.weight": fp8_pair(4, 4)[0], "b.weight_scale_inv": torch.ones(1, 1)}
        )
    ),
    "scale of a.weight has shape [1, 2]": broken(lambda t: t.update({"a.weight_scale_inv": torch.ones(1, 2)})),
    "scale of a.weight is torch.int64": broken(lambda t: t.update({"a.weight_scale_inv": torch.ones(2, 2).long()})),
    "says fp8, but no weight is stored so": broken(lambda t: (t.clear(), t.update(a=torch.zeros(1)))),
    "config.json has no quantization_config": broken(lambda t: None, None),
    "not an e4m3 matrix": broken(lambda t: t.update({"a.weight": torch.zeros(130, 130).to(torch.float8_e5m2)})),
    "lacks its x.weight_shape": broken(lambda t: t.pop("x.weight_shape"), INT4),
    "lacks its x.weight_scale": broken(lambda t: t.pop("x.weight_scale"), INT4),
    "no int4 in groups of 32": broken(lambda t: t.update({"x.weight_scale": torch.ones(5, 2)}), INT4),
    "x.weight_shape says [5, 95]": broken(lambda t: t.update({"x.weight_shape": torch.tensor([5, 95])}), INT4),
}


@pytest.mark.parametrize("said", CASES)
def test_parts_that_do_not_fit_are_named(said, tmp_path):
    tensors, quantization = CASES[said]
    with pytest.raises(DataError) as caught:
        for _ in open_weights(folder(tmp_path / "m", tensors, quantization)).iterate():
            pass
    assert said in caught.value.what and caught.value.fix


def test_a_nan_survives_to_be_found(tmp_path):
    weight, scale = fp8_pair(4, 6)
    weight.view(torch.uint8)[1, 2] = 0x7F
    opened = Dequantized(
        HfFolder(folder(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale}, FP8)),
        Scheme("fp8", (128, 128)),
    )
    assert torch.isnan(opened.read("a.weight")).nonzero().tolist() == [[1, 2]]
