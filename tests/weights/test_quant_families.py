"""fp8 of every family: what is quantised, that it reads back, and that transformers makes the same model of it."""

import re

import pytest
import torch

from slimecli import files
from slimecli.weights.export import export_weights
from slimecli.weights.hf import HfFolder
from slimecli.weights.origin import hf_origin
from slimecli.weights.quant import open_weights
from slimecli.weights.quant_fp8 import is_quantised
from tests.models import FAMILIES, OWN_CODE, tiny_model

UPSTREAM_SKIPS = (
    "layernorm embed router mlp.gate. norm lm_head eh_proj weights_proj conv1d A_log dt_bias in_proj_a in_proj_b"
)
"""what slime's tool leaves alone, by substring; everything else with `weight` in its name it quantises"""
ENGINES_KEEP = re.compile(
    r"shared_expert_gate|block_sparse_moe\.gate\.|mtp\.fc\.|input_proj|visual\.|position_embd|pos_embed|patch_embed"
)
"""plain linear layers in the engines, which would take fp8 bytes for numbers: kept, though the substrings miss them"""
STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
"""experts in one tensor, without `weight` in the name: most of the model, so quantised"""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    # the loader of transformers derives the block from the number of scales, which is right for whole blocks only
    model = tiny_model(root / "m", request.param, dtype="bfloat16", intermediate_size=256)
    export_weights(hf_origin(model), root / "q", quantize="fp8", card=lambda notes: "")
    return request.param, model, root / "q"


def test_the_rule_is_upstreams_but_for_what_engines_keep(family):
    _, model, quantised = family
    shapes = HfFolder(model).shapes
    stored = {n for n, d in HfFolder(quantised).dtypes.items() if d == torch.float8_e4m3fn}
    assert stored == {n for n, shape in shapes.items() if is_quantised(n, shape)}
    upstream = {
        n
        for n, shape in shapes.items()
        if "weight" in n and len(shape) == 2 and not any(skip in n for skip in UPSTREAM_SKIPS.split())
    }
    assert stored - upstream == {n for n in shapes if STACKED.search(n)}
    assert all(ENGINES_KEEP.search(n) for n in upstream - stored), upstream - stored
    assert sum(HfFolder(model).entries[n].nbytes for n in stored) > 0.5 * sum(
        e.nbytes for n, e in HfFolder(model).entries.items() if "embed" not in n and "lm_head" not in n
    )


def test_transformers_makes_the_same_model_of_it(family, monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8 as loader

    name, model, quantised = family
    if name in OWN_CODE:
        stated = files.read_json(quantised / "config.json")["quantization_config"]
        assert stated["weight_block_size"] == [128, 128]
        return
    monkeypatch.setattr(loader, "is_accelerate_available", lambda: True)
    export_weights(hf_origin(quantised), tmp_path / "plain", card=lambda notes: "")
    ids = torch.arange(3, 23).view(1, -1)
    logits = []
    for folder in (quantised, tmp_path / "plain", model):
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            logits.append(network(ids).logits.float())
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2]), "nothing was quantised"
    assert torch.cosine_similarity(logits[0].flatten(), logits[2].flatten(), dim=0) > 0.8


def test_every_tensor_reads_back(family):
    _, model, quantised = family
    assert open_weights(quantised).shapes == HfFolder(model).shapes
    certificate = files.read_json(quantised / "certificate.json")
    assert certificate["verified"] and set(certificate["weights"]) == set(HfFolder(model).names)
