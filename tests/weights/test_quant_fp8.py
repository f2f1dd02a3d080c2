"""Writing fp8: against the definition written out, against the error that e4m3 allows, and in transformers."""

import json
import random

import pytest
import torch

from slimecli import files
from slimecli.errors import DataError, UsageError
from slimecli.weights.hf import HfFolder, save_hf_folder
from slimecli.weights.quant import open_weights
from slimecli.weights.quant_codec import encode_e4m3
from slimecli.weights.quant_fp8 import Fp8Quantizer, error_share, is_quantised, quantizer_of
from tests.models import tiny_model

E4M3 = torch.float8_e4m3fn


def by_definition(weight, power_of_two=False):
    """Block by block, with the next e4m3 number found by looking at all of them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[torch.isfinite(numbers)].unique()
    values, scales = torch.empty(weight.shape), torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            where = slice(r * 128, r * 128 + 128), slice(c * 128, c * 128 + 128)
            block = weight[where].float()
            scale = (block.abs().max() / 448).clamp(min=1e-12)
            if power_of_two:
                scale = 2.0 ** torch.tensor(next(e for e in range(-60, 60) if 2.0**e >= scale.item()))
            scales[r, c] = scale
            distance = ((block / scale).unsqueeze(-1) - numbers).abs()
            values[where] = numbers[distance.argmin(-1)]
    return values, scales


def weights(rows, cols, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(rows, 1, generator=generator) * 3)
    return (torch.randn(rows, cols, generator=generator) * size * 0.02).to(dtype)


SHAPES = [(1, 1), (128, 128), (130, 257), (5, 300)] + [
    (random.Random(i).randint(1, 300), random.Random(i + 50).randint(1, 300)) for i in range(4)
]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape, power_of_two):
    weight = weights(*shape, seed=shape[0], dtype=torch.bfloat16)
    values, scales = encode_e4m3(weight, (128, 128), power_of_two=power_of_two)
    expected, expected_scales = by_definition(weight, power_of_two)
    assert torch.equal(scales, expected_scales)
    off = values.float() != expected  # halfway between two numbers either is the nearest
    halves = (weight.float() / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]])[off]
    assert torch.equal((values.float()[off] - halves).abs(), (expected[off] - halves).abs())
    assert off.float().mean() < 0.05


def test_hand_computed():
    weight = torch.tensor([[448.0, -224.0, 0.0, 17.0, 2.0**-10, 3 * 2.0**-10]])
    values, scales = encode_e4m3(weight, (128, 128))
    assert scales.tolist() == [[1.0]]
    # 17 lies between 16 and 18: to even; half of the smallest subnormal goes to zero, one and a half to two of them
    assert values.float().tolist() == [[448.0, -224.0, 0.0, 16.0, 0.0, 2.0**-8]]
    values, scales = encode_e4m3(weight * 3, (128, 128), power_of_two=True)
    assert scales.tolist() == [[4.0]] and values.float()[0, 0] == 336 - 16
    assert encode_e4m3(weight * 4, (128, 128), power_of_two=True)[1].tolist() == [[4.0]], "a power stays what it is"


def test_zero_blocks_and_tiny_ones_stay_finite():
    weight = torch.zeros(200, 200)
    weight[150, 150] = 1e-30
    values, scales = encode_e4m3(weight, (128, 128))
    assert (scales == torch.full((2, 2), 1e-12)).all() and not values.float().any()


def test_the_largest_number_never_becomes_nan():
    weight = torch.rand(64, 4096) * torch.logspace(-30, 30, 64)[:, None]
    for power_of_two in (False, True):
        values, _ = encode_e4m3(weight, (1, 128), power_of_two=power_of_two)
        assert torch.isfinite(values.float()).all() and values.float().max() <= 448


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_broken_weights_are_named(bad):
    weight = weights(140, 140, 0)
    weight[139, 3] = bad
    with pytest.raises(DataError, match=r"x\.q_proj\.weight holds NaN"):
        list(Fp8Quantizer().stream([("x.q_proj.weight", weight)]))


def test_stacked_experts_are_quantised_one_by_one():
    stack = torch.stack([weights(130, 140, s) for s in range(3)])
    values, scales = encode_e4m3(stack, (128, 128))
    for i, one in enumerate(stack):
        alone = encode_e4m3(one, (128, 128))
        assert torch.equal(values[i].float(), alone[0].float()) and torch.equal(scales[i], alone[1])


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.self_attn.indexer.wq_b.weight", True),
        ("model.layers.0.mlp.gate_up_proj.weight", True),
        ("model.layers.0.mlp.experts.7.down_proj.weight", True),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", True),
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", True),
        ("model.layers.0.linear_attn.out_proj.weight", True),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.block_sparse_moe.gate.weight", False),
        ("model.layers.0.self_attn.indexer.weights_proj.weight", False),
        ("model.layers.9.eh_proj.weight", False),
        ("mtp.fc.weight", False),
        ("model.mtp_layers.0.input_proj.weight", False),
        ("model.layers.0.linear_attn.conv1d.weight", False),
        ("model.layers.0.linear_attn.in_proj_a.weight", False),
        ("model.layers.0.linear_attn.in_proj_ba.weight", False),
        ("model.visual.blocks.0.mlp.gate_proj.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
    ],
)
def test_which_weights_are_quantised(name, quantised):
    assert is_quantised(name, (4, 4)) is quantised
    assert not is_quantised(name, (4,))


def quantised_copy(model, out, **kind):
    quantizer = Fp8Quantizer(**kind)
    save_hf_folder(quantizer.stream(HfFolder(model).iterate()), out, like=model)
    quantizer.finish(out)
    return quantizer


@pytest.mark.parametrize("power_of_two", [False, True])
def test_written_folder_reads_back_within_the_error_of_e4m3(power_of_two, tmp_path):
    model = tiny_model(tmp_path / "m")
    quantizer = quantised_copy(model, tmp_path / "q", power_of_two=power_of_two)
    source, result = HfFolder(model), open_weights(tmp_path / "q")
    assert result.names == source.names and result.shapes == source.shapes
    assert len(quantizer.quantised) == 3 * 7
    worst = []
    for name, tensor in source.iterate():
        back = result.read(name)
        if name in quantizer.quantised:
            worst.append(error_share(tensor, back, power_of_two=power_of_two))
            assert not torch.equal(back.float(), tensor)
        else:
            assert torch.equal(back, tensor)
    assert 0.5 < max(worst) <= 1
    wrong = result.read("model.layers.0.mlp.up_proj.weight").clone()
    wrong[0, 0] += 0.1
    assert error_share(source.read("model.layers.0.mlp.up_proj.weight"), wrong) > 1


def test_quantising_again_changes_nothing(tmp_path):
    model = tiny_model(tmp_path / "m", dtype="bfloat16")
    quantised_copy(model, tmp_path / "a", power_of_two=True)
    opened, quantizer = open_weights(tmp_path / "a"), Fp8Quantizer(power_of_two=True)
    save_hf_folder(quantizer.stream(opened.iterate()), tmp_path / "b", like=model)
    first, second = HfFolder(tmp_path / "a"), HfFolder(tmp_path / "b")
    assert first.shapes == second.shapes
    restored = dict(opened.iterate())
    quantizer.finish(tmp_path / "b")
    assert all(torch.equal(t, restored[n]) for n, t in open_weights(tmp_path / "b").iterate())


def test_config_says_what_transformers_wants(tmp_path):
    from transformers import AutoConfig
    from transformers.utils.quantization_config import FineGrainedFP8Config

    model = tiny_model(tmp_path / "m")
    quantised_copy(model, tmp_path / "q")
    stated = files.read_json(tmp_path / "q" / "config.json")["quantization_config"]
    assert stated == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    parsed = FineGrainedFP8Config(**AutoConfig.from_pretrained(tmp_path / "q").quantization_config)
    assert parsed.weight_block_size == [128, 128] and parsed.scale_fmt == "float"
    quantised_copy(model, tmp_path / "p", power_of_two=True)
    stated = files.read_json(tmp_path / "p" / "config.json")["quantization_config"]
    assert FineGrainedFP8Config(**stated).scale_fmt == "ue8m0"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_transformers_reads_the_same_numbers(family, tmp_path, monkeypatch):
    """On a CPU its loader dequantises; it demands whole blocks there, hence the sizes."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8 as loader

    monkeypatch.setattr(loader, "is_accelerate_available", lambda: True)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = tiny_model(tmp_path / "m", family, dtype="bfloat16", **size)
    quantised_copy(model, tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16).state_dict()
    for name, tensor in open_weights(tmp_path / "q").iterate():
        assert torch.equal(loaded[name], tensor), name


def test_a_model_without_known_layers_is_refused(tmp_path):
    model = tiny_model(tmp_path / "m")
    quantizer = Fp8Quantizer()
    save_hf_folder(quantizer.stream([("a.strange.weight", torch.zeros(2, 2))]), tmp_path / "q", like=model)
    with pytest.raises(DataError, match=r"\(a\.strange\)"):
        quantizer.finish(tmp_path / "q")
    assert "quantization_config" not in json.loads((tmp_path / "q" / "config.json").read_text())


def test_names_of_the_ways_to_quantise():
    assert quantizer_of("") is None
    assert quantizer_of("fp8").power_of_two is False and quantizer_of("fp8-ue8m0").power_of_two is True
    with pytest.raises(UsageError, match="did you mean 'fp8'"):
        quantizer_of("fp9")
