"""Arguments that the trainer cannot mean are told with the reason, and harmless values pass."""

from __future__ import annotations

import pytest

from slimecli.errors import UsageError
from slimecli.model_specs import get_spec
from slimecli.trainers.megatron import refusals
from slimecli.trainers.megatron.arguments import problems_of, settings_of
from slimecli.trainers.megatron.fields import known_fields
from slimecli.trainers.megatron.model import make_config
from tests.trainers import made

DENSE, EXPERTS = get_spec("qwen3-0.6b"), get_spec("qwen3-30b-a3b")


def told(*options, spec=DENSE, on_gpu=False):
    recipe = made.recipe("trainer.backend=megatron", *(f"megatron.{o}" for o in options))
    return problems_of(recipe, spec, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("softmax_scale=0.5", "what qwen3-30b-a3b computes follows from its folder"),
        ("no_rope_freq=2", "follows from its folder"),
        ("moe_router_force_load_balancing=true", "through other experts than in the engine"),
        ("moe_expert_capacity_factor=1.0", "through other experts than in the engine"),
        ("moe_z_loss_coeff=0.001", "auxiliary losses have no place in a loss with global denominators"),
        ("moe_aux_loss_coeff=0.001", "only 0 is taken"),
        ("moe_router_load_balancing_type=sinkhorn", "'sinkhorn' is not one of none, aux_loss"),
        ("moe_token_dispatcher_type=flex", "it needs DeepEP, which is not installed"),
        ("use_megatron_fsdp=true", "slime's FSDP is trainer.backend = 'fsdp'"),
        ("average_in_collective=true", "gradients are summed, never averaged"),
        ("num_distributed_optimizer_instances=2", "it is always 1"),
        ("optimizer=sgd", "it is always 'adam'"),
        ("transformer_impl=local", "it is always 'transformer_engine'"),
        ("loss_scale=0.5", "only float16 needs it"),
        ("pipeline_model_parallel_layout='Et|tL'", "decoder-last-pipeline-num-layers"),
        ("overlap_moe_expert_parallel_comm=true", "a schedule of passes that slime does not have"),
        ("tp_comm_overlap=true", "its buffers are of one length"),
        ("cuda_graph_impl=local", "graphs are recorded for one length"),
        ("enable_cuda_graph=true", "graphs are recorded for one length"),
        ("use_te_rng_tracker=true", "only recorded graphs need it"),
        ("attention_backend=flashy", "it takes one of flash, fused, unfused, local, auto"),
        ("fp8_recipe=mxfp8", "has no effect without fp8"),
        ("fp4_recipe=nvfp4", "has no effect without fp4"),
        ("fp4_param=true", "weights are read, swapped and published in pieces"),
        ("fp8_param_gather=true", "weights are read, swapped and published in pieces"),
        ("fp8=hybrid", "needs a GPU, and there is none here"),
        ("moe_permute_fusion=true", "needs a GPU, and there is none here"),
        ("use_kitchen=true", "needs a GPU, and there is none here"),
    ],
)
def test_each_is_told_with_its_reason(option, reason):
    (problem,) = told(option, spec=EXPERTS)
    assert reason in problem and problem.startswith(f"[megatron] {option.partition('=')[0]} ")


@pytest.mark.parametrize(
    "options",
    [
        ("optimizer=adam", "transformer_impl=transformer_engine", "num_distributed_optimizer_instances=1"),
        ("moe_router_load_balancing_type=seq_aux_loss", "moe_aux_loss_coeff=0", "moe_z_loss_coeff=0.0"),
        ("softmax_type=vanilla", "attention_backend=flash", "qk_l2_norm=false", "cuda_graph_impl=none"),
        ("moe-router-load-balancing-type=['aux_loss','none']", "moe_aux_loss_coeff=[0.0,0.0]"),
    ],
)
def test_values_that_change_nothing_are_taken(options):
    assert told(*options, spec=EXPERTS) == []


def test_an_own_layer_spec_may_compute_otherwise(tmp_path):
    (tmp_path / "own.py").write_text("def layers(config, vp_stage):\n    return None\n")
    option = "softmax_scale=0.5"
    assert told(option) and told(option, f"spec={tmp_path}/own.py:layers") == []
    assert told("moe_z_loss_coeff=0.1", f"spec={tmp_path}/own.py:layers"), "that is no matter of layers"


def test_only_arguments_of_megatron_core_are_listed():
    known = {name for fields in known_fields().values() for name in fields}
    listed = {*refusals.NETWORK, *refusals._ROUTES, *refusals._AUXILIARY, *refusals._ELSEWHERE, *refusals._FIXED}
    assert len(listed & known) >= len(listed) - 3, sorted(listed - known)


@pytest.mark.parametrize(("said", "place"), [("train-iters", "steps"), ("max-tokens-per-gpu", "trainer.max_tokens_p")])
def test_what_the_recipe_says_elsewhere_names_the_place(said, place):
    (problem,) = told(f"{said}=3")
    assert f"[megatron] {said}: the recipe says that in {place}" in problem


def test_no_object_is_proposed_for_a_name_that_is_unknown():
    (problem,) = told("timer=3")
    assert "timers" not in problem


def test_what_only_megatron_core_refuses_is_a_usage_error_in_its_words():
    options = ("recompute_granularity=selective", "recompute_modules=['nonsense']")
    recipe = made.recipe("trainer.backend=megatron", *(f"megatron.{o}" for o in options))
    with pytest.raises(UsageError, match="megatron-core refuses what .megatron. says: .*nonsense"):
        make_config(DENSE, settings_of(recipe, DENSE, on_gpu=False))
