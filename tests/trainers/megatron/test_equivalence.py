"""Every layout trains alike: as FSDP does, or as one Megatron process where transformers' class cannot be packed.

Compared are reference and policy log-probs before two steps, loss, gradient norm and all metrics of both steps, and the
weights after them, which LIKE_SGD makes a comparison of gradients.
"""

from __future__ import annotations

import pytest

from slimecli.model_specs import get_spec
from slimecli.trainers.megatron import arguments, passes
from tests.trainers import made
from tests.trainers.megatron.conftest import initial
from tests.trainers.megatron.ranks import LIKE_SGD, differences, megatron, observe

LIMITS = {"log_probs": 3e-5, "stats": 5e-6, "update": 5e-5}
"""float32: nats, relative, and relative by norm (of which rounding of the stored weights is about 1e-5)"""
RECURRENT = {"log_probs": 3e-4, "stats": 1e-4, "update": 2e-3}
"""the same where rounding is carried from token to token; single steps are held against transformers more closely"""
GRPO = ("algo.kl_coef=0.1", *LIKE_SGD)
SMALL = "trainer.max_tokens_per_micro_batch=48"
"""several micro-batches per rank"""
TP2, PP2, CP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
EP2, VPP2 = (f"{name}_model_parallel_size=2" for name in ("expert", "virtual_pipeline"))
TP4 = "tensor_model_parallel_size=4"
"""twice the key heads of a tiny model: pairs of ranks share one"""
SP, ETP1, ETP2 = "sequence_parallel=true", "expert_tensor_parallel_size=1", "expert_tensor_parallel_size=2"
UNEVEN = "decoder_first_pipeline_num_layers=1"
FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
SELECTIVE = ("recompute_granularity=selective",)
OVERLAP = ("overlap_grad_reduce=true", "overlap_param_gather=true")
PLAIN = ("use_distributed_optimizer=false",)

DENSE = [
    ("qwen3", megatron()),
    ("qwen3", (*megatron(), SMALL)),
    ("qwen3", megatron(*FULL)),
    ("qwen3", megatron(*SELECTIVE)),
    ("qwen3", (*megatron(), "trainer.activation_checkpointing=true", SMALL)),
    ("qwen3", megatron(TP2, processes=2)),
    ("qwen3", (*megatron(TP2, SP, processes=2), SMALL)),
    ("qwen3", (*megatron(PP2, processes=2), SMALL)),
    ("qwen3", megatron(PP2, UNEVEN, processes=2)),
    ("qwen3", (*megatron(PP2, VPP2, processes=2), SMALL)),
    ("qwen3", (*megatron(processes=2), SMALL)),
    ("qwen3", (*megatron(CP2, processes=2), SMALL)),
    ("qwen3", (*megatron(*PLAIN, processes=2), SMALL)),
    ("qwen3", (*megatron(*OVERLAP, processes=2), SMALL)),
    ("qwen3", megatron(TP2, PP2, SP, *FULL, processes=4)),
    ("qwen3", megatron(PP2, CP2, processes=4)),
    ("qwen3", (*megatron(PP2, VPP2, *OVERLAP, processes=4), SMALL)),
    ("qwen2", megatron(TP2, SP, processes=2)),
    ("qwen2", megatron(TP4, SP, processes=4)),
    ("llama", megatron(PP2, processes=2)),
    ("llama", megatron(CP2, processes=2)),
    ("glm4", megatron(TP2, SP, processes=2)),
    ("glm4", megatron(PP2, *FULL, processes=2)),
]
EXPERTS = [
    ("qwen3_moe", (*megatron(), SMALL)),
    ("qwen3_moe", megatron(*FULL)),
    ("qwen3_moe", (*megatron(processes=2), SMALL)),
    ("qwen3_moe", (*megatron(EP2, *OVERLAP, processes=2), SMALL)),
    ("qwen3_moe", megatron(EP2, *PLAIN, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, ETP1, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("qwen3_moe", megatron(TP2, SP, EP2, ETP2, processes=4)),
    ("qwen3_moe", megatron(CP2, EP2, processes=2)),
    ("qwen3_moe", (*megatron(PP2, VPP2, EP2, processes=4), SMALL)),
    ("glm4_moe", megatron(TP2, SP, EP2, ETP1, *SELECTIVE, processes=2)),
    ("mixtral", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("mixtral", megatron(PP2, processes=2)),
    ("qwen2_moe", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("qwen2_moe", megatron(PP2, processes=2)),
    ("minimax_m2", megatron(TP2, SP, processes=2)),
    ("minimax_m2", megatron(TP4, SP, processes=4)),
    ("deepseek_v3", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("deepseek_v3", (*megatron(PP2, CP2, processes=4), SMALL)),
    ("deepseek_v3", megatron(*FULL)),
    ("moonlight", megatron(TP2, SP, processes=2)),
    ("glm4_moe_lite", megatron(EP2, processes=2)),
    ("glm4_moe_lite", megatron(CP2, processes=2)),
    ("qwen3_next", megatron(TP2, SP, EP2, ETP1, processes=2)),
    ("qwen3_next", (*megatron(PP2, *FULL, processes=2), SMALL)),
    ("qwen3_5", megatron(TP2, processes=2)),
    ("qwen3_5", (*megatron(CP2, processes=2), SMALL)),
]


def check(found, expected, folder, limits=LIMITS):
    apart = differences(found, expected, initial(folder))
    assert all(apart[what] <= limit for what, limit in limits.items()), apart


@pytest.mark.parametrize(("family", "layout"), DENSE, ids=lambda v: v if isinstance(v, str) else " ".join(v[1:]))
def test_dense_models_train_as_with_fsdp(model_of, alone, family, layout):
    folder = model_of(family, 4)
    expected = alone(folder, GRPO)
    check(observe(folder, (*GRPO, *layout)), expected, folder)


@pytest.mark.parametrize(("family", "layout"), EXPERTS, ids=lambda v: v if isinstance(v, str) else " ".join(v[1:]))
def test_other_models_train_as_in_one_process(model_of, alone, family, layout):
    three = family in ("deepseek_v3", "glm4_moe_lite") and f"megatron.{PP2}" not in layout
    folder = model_of(family, 3 if three else 4)
    recurrent = family in ("qwen3_next", "qwen3_5")
    options = (*GRPO, "trainer.lr=3e2") if recurrent else GRPO
    found, expected = observe(folder, (*options, *layout)), alone(folder, (*options, *megatron()))
    check(found, expected, folder, RECURRENT if recurrent else LIMITS)


@pytest.mark.parametrize("layout", [megatron(TP2, processes=2), megatron(CP2, processes=2)], ids=["TP2", "CP2"])
def test_at_another_temperature(model_of, alone, layout):
    folder = model_of("qwen3", 4)
    expected = alone(folder, GRPO, temperature=0.7)
    check(observe(folder, (*GRPO, *layout), temperature=0.7), expected, folder)
    assert differences(expected, alone(folder, GRPO), initial(folder))["log_probs"] > 1


@pytest.mark.parametrize("layout", [megatron(TP2, SP, processes=2), megatron(PP2, processes=2)], ids=["TP2", "PP2"])
def test_supervised(model_of, alone, layout):
    folder, sft = model_of("qwen3", 4), ("algo.name=sft", *LIKE_SGD)
    check(observe(folder, (*sft, *layout)), alone(folder, sft), folder)


def test_entropy_bonus_and_no_clipping(model_of, alone):
    folder = model_of("llama", 4)
    extra = (
        "algo.entropy_coef=0.01",
        "trainer.lr=1e3",
        "trainer.adam_eps=1e4",
        "trainer.beta1=0",
        "trainer.clip_grad=0",
    )
    layout = megatron(TP2, PP2, processes=4)
    check(observe(folder, (*extra, *layout)), alone(folder, extra), folder)


@pytest.mark.parametrize(
    "layout",
    [megatron(processes=2), megatron(CP2, processes=4), megatron(PP2, VPP2, processes=2)],
    ids=["DP2", "CP2 DP2", "VPP2"],
)
def test_a_rank_without_a_sample(model_of, alone, layout):
    """One sample for two data-parallel ranks, or for the two micro-batches that interleaving takes."""
    folder, sft = model_of("qwen3", 4), ("algo.name=sft", *LIKE_SGD)
    one = {"count": 1, "size": 1}
    check(observe(folder, (*sft, *layout), **one), alone(folder, sft, **one), folder)


@pytest.mark.parametrize(
    "layout",
    [megatron(PP2, processes=2), megatron(PP2, VPP2, processes=2), megatron(TP2, PP2, VPP2, SP, processes=4)],
    ids=["PP2", "VPP2", "TP2 VPP2"],
)
def test_stages_exchange_the_same_in_the_ways_that_a_gpu_is_set_to(model_of, alone, monkeypatch, layout):
    """Batches of sends and receives, and both ways at once where chunks interleave."""
    forced = arguments._forced
    monkeypatch.setattr(arguments, "_forced", lambda layout, on_gpu: forced(layout, True))
    folder = model_of("qwen3", 4)
    check(observe(folder, (*GRPO, *layout, SMALL)), alone(folder, GRPO), folder)


@pytest.mark.parametrize(
    ("options", "multiple"),
    [((), 1), (("fp8=hybrid",), 128), (("fp4=e2m1",), 128), (("fp8=hybrid", TP2, SP), 256), ((TP2, SP), 2)],
    ids=str,
)
def test_positions_are_whole_blocks_where_they_are_quantised(monkeypatch, options, multiple):
    """Transformer Engine refuses others. It is not here: only how many positions there would be is looked at."""
    monkeypatch.setattr(arguments, "NEEDS_TRANSFORMER_ENGINE", ())
    recipe = made.recipe(*megatron(*options, processes=2))
    assert passes.local_multiple(arguments.settings_of(recipe, get_spec("qwen3-0.6b"), on_gpu=True)) == multiple


@pytest.mark.parametrize("layout", [megatron(TP2, SP, processes=2), megatron(CP2, processes=2)], ids=["TP2", "CP2"])
def test_padding_to_whole_blocks_changes_nothing(model_of, alone, monkeypatch, layout):
    plain = passes.make_micro_batch

    def seen(*args, **options):
        found = plain(*args, **options)
        assert found.token_ids.shape[1] % 256 == 0
        return found

    monkeypatch.setattr(passes, "local_multiple", lambda settings: 256)
    monkeypatch.setattr(passes, "make_micro_batch", seen)
    folder = model_of("qwen3", 4)
    check(observe(folder, (*GRPO, *layout, SMALL)), alone(folder, GRPO), folder)


def test_adam_with_weight_decay_and_schedule(model_of, alone):
    """Rounding in a gradient near zero is a full step for Adam, so the limit is on the step and not on the gradient."""
    folder = model_of("qwen3", 4)
    options = ("algo.kl_coef=0.1", "trainer.weight_decay=0.1", "trainer.lr_schedule=linear", "trainer.warmup_steps=1")
    layout = megatron(TP2, PP2, SP, processes=4)
    check(observe(folder, (*options, *layout)), alone(folder, options), folder, {**LIMITS, "update": 1e-4})


@pytest.mark.parametrize(
    "layout", [megatron(CP2, processes=2), (*megatron(CP2, processes=4), SMALL)], ids=["CP2", "CP2 DP2"]
)
def test_losses_of_whole_answers_see_them_whole_on_every_rank(model_of, alone, layout):
    """A ratio, a correction and a masking by answer, of which each context-parallel rank computes a part."""
    whole = ("algo.name=gspo", "algo.opsm_delta=1", "algo.correction.level=geometric", *LIKE_SGD, "trainer.lr=3e5")
    folder = model_of("qwen3", 4)
    expected = alone(folder, whole)
    assert 0 < expected["stats"][0]["metrics"]["opsm_masked"] < 1
    check(observe(folder, (*whole, *layout)), expected, folder)
