"""Shapes that a model can be divided into are those that megatron-core builds; others are refused with the nearest."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slimecli.model_specs import get_spec
from slimecli.trainers.megatron.arguments import settings_of
from slimecli.trainers.megatron.layout import Layout, problems
from slimecli.trainers.megatron.model import make_config
from tests.trainers import made

SMALL = {"layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "ffn": 192, "vocab": 300}
DENSE = replace(get_spec("qwen3-0.6B"), **SMALL)
MOE_SPEC = get_spec("qwen3-30B-A3B")
MOE = replace(MOE_SPEC, **SMALL, moe=replace(MOE_SPEC.moe, experts=4, top_k=2, ffn=24))
MLA_SPEC = get_spec("moonlight-16B-A3B")


def said(spec, **sizes):
    return "; ".join(problems(spec, Layout(**{"etp": sizes.get("tp", 1), **sizes})))


@pytest.mark.parametrize(
    ("spec", "sizes", "reason"),
    [
        (DENSE, {"world": 3, "tp": 2}, "trainer.processes = 3 is not a multiple of TP x PP x CP = 2; 2 or 4 would be"),
        (DENSE, {"world": 3, "tp": 3}, "tensor-model-parallel-size 3 does not divide the 4 query heads; 2 or 4 does"),
        (DENSE, {"world": 8, "tp": 8}, "does not divide the 4 query heads; 4 does"),
        (replace(DENSE, gated=True), {"world": 4, "tp": 4}, "does not divide the 2 key-value heads; 2 does"),
        # 7 divides the 28 query heads, but neither the 4 key-value heads nor the MLP
        (
            get_spec("qwen2.5-7B"),
            {"world": 8, "tp": 8},
            "tensor-model-parallel-size 8 does not divide the 28 query heads; 4 does",
        ),
        (MOE, {"world": 6, "ep": 4}, "does not divide the 6 processes of a pipeline stage; 2 x 1 does"),
        (
            replace(MOE, moe=replace(MOE.moe, ffn=22)),
            {"world": 4, "tp": 4, "sp": True},
            "4 does not divide 22 rows of an expert; 2 or 11 does",
        ),
        (DENSE, {"world": 4, "pp": 4}, "6 layers cannot be divided over 4 pipeline parts"),
        (DENSE, {"world": 5, "pp": 5}, "6 layers cannot be divided over 5 pipeline parts"),
        (DENSE, {"world": 2, "pp": 2, "vpp": 2}, "6 layers cannot be divided over 4 pipeline parts; 3 or 6 would do"),
        (DENSE, {"world": 3, "pp": 3, "first_layers": 1}, "5 layers besides the first and last stage"),
        (
            replace(DENSE, layers=7),
            {"world": 2, "pp": 2, "vpp": 2, "first_layers": 3},
            "decoder-first-pipeline-num-layers 3 is no multiple of the 2 chunks of a stage; 2 or 4 is",
        ),
        (
            DENSE,
            {"world": 1, "last_layers": 3},
            "decoder-last-pipeline-num-layers needs a pipeline-model-parallel-size",
        ),
        (DENSE, {"world": 1, "vpp": 2}, "interleaved pipelining needs a pipeline-model-parallel-size above 1"),
        (DENSE, {"world": 1, "sp": True}, "sequence-parallel needs a tensor-model-parallel-size above 1"),
        (DENSE, {"world": 2, "ep": 2}, "expert-model-parallel-size 2: qwen3-0.6b has no experts"),
        (MOE, {"world": 2, "tp": 2}, "needs sequence-parallel = true"),
        (MOE, {"world": 3, "ep": 3}, "expert-model-parallel-size 3 does not divide 4 experts; 2 or 4 does"),
        (MOE, {"world": 2, "ep": 4}, "does not divide the 2 processes of a pipeline stage"),
        (MOE, {"world": 5, "tp": 1, "etp": 5}, "expert-tensor-parallel-size 5 does not divide 24 rows of an expert"),
    ],
    ids=lambda v: " ".join(f"{k}={n}" for k, n in v.items()) if isinstance(v, dict) else "",
)
def test_reasons(spec, sizes, reason):
    assert reason in said(spec, **sizes)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (DENSE, {"world": 4, "tp": 4, "sp": True}),
        (DENSE, {"world": 3, "pp": 3}),
        (DENSE, {"world": 2, "pp": 2, "first_layers": 2}),
        (DENSE, {"world": 2, "pp": 2, "first_layers": 1, "last_layers": 5}),
        (DENSE, {"world": 8, "pp": 2, "cp": 2, "vpp": 3}),
        (DENSE, {"world": 2, "pp": 2, "vpp": 2, "first_layers": 2}),
        (MOE, {"world": 8, "tp": 2, "sp": True, "ep": 4, "etp": 1}),
    ],
)
def test_legal_shapes(spec, sizes):
    assert said(spec, **sizes) == ""
    layout = Layout(**sizes)
    assert layout.dp * layout.tp * layout.pp * layout.cp == layout.world


def test_what_is_called_near_is_legal():
    """Every number that a reason proposes for tensor or expert parallelism works."""
    for tp in range(1, 9):
        for near in re.findall(r"query heads; ([\d or]+) does", said(DENSE, world=tp, tp=tp)):
            assert all(said(DENSE, world=int(n), tp=int(n), etp=int(n)) == "" for n in near.split(" or "))
    for ep in range(1, 6):
        for near in re.findall(r"experts; ([\d or]+) does", said(MOE, world=ep, ep=ep)):
            assert all(said(MOE, world=int(n), ep=int(n)) == "" for n in near.split(" or "))


def options(tp, pp, vpp, cp, ep):
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
    }
    given = [f"megatron.{k}={v}" for k, v in sizes.items() if v > 1]
    if tp > 1:
        given += ["megatron.sequence_parallel=true", "megatron.expert_tensor_parallel_size=1"]
    return ("trainer.backend=megatron", f"trainer.processes={tp * pp * cp * (ep if tp == 1 else 1)}", *given)


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=["dense", "experts"])
def test_megatron_core_takes_what_is_called_legal(spec):
    """Its own assertions are in the making of its configs; the groups are those of trainers in the other tests."""
    legal = 0
    for tp, pp, vpp, cp, ep in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2), (1, 2)):
        recipe = made.recipe(*options(tp, pp, vpp, cp, ep))
        layout = Layout(world=recipe.trainer.processes, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, sp=tp > 1, etp=1)
        if spec is DENSE:
            layout = replace(layout, etp=tp)
        if problems(spec, layout):
            continue
        given = recipe if spec is MOE else made.recipe(*(o for o in options(tp, pp, vpp, cp, ep) if "expert" not in o))
        config = make_config(spec, settings_of(given, spec, on_gpu=False))
        assert isinstance(config, TransformerConfig)
        assert (config.tensor_model_parallel_size, config.context_parallel_size) == (tp, cp)
        assert config.params_dtype == torch.float32
        legal += 1
    assert legal > 15


def test_registered_models_have_configs():
    """Every model of the registry that the backend trains makes a config in one process."""
    from slimecli.errors import UsageError
    from slimecli.model_specs import registry

    kinds = set()
    for name in registry():
        spec = get_spec(name)
        try:
            config = make_config(spec, settings_of(made.recipe("trainer.backend=megatron"), spec, on_gpu=False))
        except UsageError as error:
            assert "needs trainer.backend = 'fsdp'" in str(error)
            assert spec.linear or spec.indexer or spec.gated, (name, str(error))
            continue
        kinds.add(spec.family.model_type)
        assert isinstance(config, MLATransformerConfig) == (spec.mla is not None)
        assert config.num_layers == spec.layers
    assert kinds >= {"qwen2", "qwen3", "llama", "mimo", "glm4", "qwen3_moe", "glm4_moe", "minimax_m2", "deepseek_v3"}
    assert kinds >= {"mixtral", "qwen2_moe"}
