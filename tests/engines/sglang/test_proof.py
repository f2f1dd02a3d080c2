"""What SGLang makes of Hugging Face weights, computed here: arrangement, ranks, hashes, and what a comparison says."""

import asyncio
import hashlib

import pytest
import torch

from slimecli.engines.sglang.device_hash import device_hash
from slimecli.engines.sglang.proof import Checksums, Held, check, compare, prove
from slimecli.errors import SlimeError
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder


def sums(pairs, **how):
    out = Checksums(**how)
    for name, tensor in pairs:
        out.update(name, tensor)
    return out.ranks


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def layer(seed=0):
    g = torch.Generator().manual_seed(seed)
    prefix = "model.layers.0."
    shapes = {
        "self_attn.q_proj.weight": (8, 4), "self_attn.k_proj.weight": (4, 4), "self_attn.v_proj.weight": (4, 4),
        "self_attn.o_proj.weight": (4, 8), "mlp.gate_proj.weight": (6, 4), "mlp.up_proj.weight": (6, 4),
        "mlp.down_proj.weight": (4, 6), "input_layernorm.weight": (4,), "self_attn.q_norm.weight": (2,),
    }  # fmt: skip
    named = {prefix + name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return named | {"model.embed_tokens.weight": torch.randn(70, 4, generator=g), "model.norm.weight": torch.ones(4)}


def test_parts_are_fused_and_the_vocabulary_is_padded():
    named = layer()
    (rank,) = sums(reversed(named.items()))
    q, k, v = (named[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    assert rank["model.layers.0.self_attn.qkv_proj.weight"] == sha(torch.cat([q, k, v]))
    gate, up = (named[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert rank["model.layers.0.mlp.gate_up_proj.weight"] == sha(torch.cat([gate, up]))
    assert rank["model.embed_tokens.weight"] == sha(torch.cat([named["model.embed_tokens.weight"], torch.zeros(58, 4)]))
    assert rank["model.norm.weight"] == sha(torch.ones(4)) and len(rank) == 8


def test_each_rank_holds_its_share():
    named = layer()
    ranks = sums(named.items(), ranks=2)
    q, k, v = (named[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    second = ranks[1]
    assert second["model.layers.0.self_attn.qkv_proj.weight"] == sha(torch.cat([q[4:], k[2:], v[2:]]))
    assert second["model.layers.0.self_attn.o_proj.weight"] == sha(
        named["model.layers.0.self_attn.o_proj.weight"][:, 4:]
    )
    padded = torch.cat([named["model.embed_tokens.weight"], torch.zeros(58, 4)])
    assert second["model.embed_tokens.weight"] == sha(padded[64:])
    assert ranks[0]["model.norm.weight"] == second["model.norm.weight"]


def test_weights_are_cast_as_the_engine_computes():
    tensor = torch.randn(4, generator=torch.Generator().manual_seed(1)).bfloat16()
    (rank,) = sums([("model.norm.weight", tensor)], dtype="float32")
    assert rank["model.norm.weight"] == sha(tensor.float())


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (torch.arange(5, dtype=torch.int32), 9308646808914616906),
        (torch.arange(301, dtype=torch.int16), 6256438487632517356),
        (torch.arange(50000, dtype=torch.int32), 246724654783993146),
    ],
)
def test_the_hash_of_a_gpu(tensor, value):
    """Values by SGLang 0.5.21's own Triton kernel, run in Triton's interpreter."""
    assert device_hash(tensor) == value
    assert device_hash(tensor.flip(0)) != value


def held(ranks, device="cpu"):
    return Held(version="3", dtype="float32", device=device, ranks=ranks)


def test_a_comparison_names_what_differs():
    named = layer()
    expected = sums(named.items())
    assert compare(held(expected), expected).different == []
    other = sums((named | {"model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4)}).items())
    with pytest.raises(SlimeError, match=r"gate_up_proj\.weight differ\(s\), 7 are equal"):
        check("http://x", held(other), expected)
    without = [{k: v for k, v in expected[0].items() if "o_proj" not in k}]
    assert compare(held(without), expected).different == [
        "model.layers.0.self_attn.o_proj.weight (which it does not have)"
    ]
    more = [{**expected[0], "model.layers.0.mlp.experts.w13_weight": "0"}]
    proof = check("http://x", held(more), expected)
    assert (proof.equal, proof.not_compared) == (8, ["model.layers.0.mlp.experts.w13_weight"])
    with pytest.raises(SlimeError, match="none of the 1 parameters"):
        check("http://x", held([{"model.layers.0.mlp.experts.w13_weight": "0"}]), [{}])


class Fake:
    """Answers as SGLang does, holding what it is given."""

    url = "http://fake"

    def __init__(self, pairs, version="3"):
        self.ranks, self.version = sums(pairs, dtype="float32"), version

    async def call(self, method, path, payload, doing):
        return {
            "/server_info": {"dtype": "float32", "device": "cpu"},
            "/model_info": {"weight_version": self.version},
            "/weights_checker": {"success": True, "ranks": [{"checksums": rank} for rank in self.ranks]},
        }[path]


def test_a_proof_gives_the_fingerprint_of_what_was_compared(models):
    folders = [HfFolder(models("qwen3", seed)) for seed in (0, 1)]
    said, mark = asyncio.run(prove(Fake(folders[0].iterate()), folders[0].iterate()))
    assert (said.version, mark) == ("3", fingerprint(folders[0].iterate()))
    with pytest.raises(SlimeError, match="does not hold what it was sent"):
        asyncio.run(prove(Fake(folders[1].iterate()), folders[0].iterate()))
