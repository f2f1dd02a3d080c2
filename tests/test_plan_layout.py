"""What is wrong with how trainer and engines are to be laid over GPUs."""

import pytest

from slimecli.plan_checks import check_batch
from slimecli.plan_layout import check_placement
from slimecli.recipe import load_recipe

COLOCATED = "cluster.placement=colocated"
TP2 = ("trainer.backend=megatron", "trainer.processes=4", "megatron.tensor-model-parallel-size=2")


def problems(*overrides):
    return list(check_placement(load_recipe("", overrides), None))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*TP2[:2], "megatron.tensor-model-parallel-size=3"), "4 trainer processes are not whole groups of 3"),
        ((COLOCATED, *TP2, "engine.backend=sglang", "sglang.tp=3"), "of 2, 3 GPUs do not share out evenly"),
        ((COLOCATED, "engine.urls=['http://x']"), "share no GPUs with a trainer"),
        ((COLOCATED, "rollout.max_staleness=1"), "has them work at the same time"),
    ],
)
def test_each_contradiction_is_the_one_problem_told(overrides, expected):
    (problem,) = problems(*overrides)
    assert expected in problem


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (COLOCATED,),
        (COLOCATED, *TP2, "engine.backend=sglang", "sglang.tp=4"),
        ("rollout.max_staleness=1",),
        ("cluster.placement=disaggregated", *TP2, "engine.backend=sglang", "sglang.tp=3"),
        ("trainer.backend=megatron", "megatron.tensor-model-parallel-size=x"),
        ("trainer.backend=megatron", "megatron.tensor-model-parallel-size=0"),
    ],
)
def test_what_goes_together_is_let_through(overrides):
    assert problems(*overrides) == []


STAGES = ("trainer.backend=megatron", "megatron.pipeline-model-parallel-size=3", "steps=0")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("trainer.processes=3", "steps=0"), "32 is no multiple of trainer.processes 3; nearest: 30 or 33"),
        ((*STAGES, "trainer.processes=3"), ""),
        ((*STAGES, "trainer.processes=12"), ""),
        ((*STAGES, "trainer.processes=9"), "32 is no multiple of the 3 data-parallel processes; nearest: 30 or 33"),
        ((*STAGES, "trainer.processes=10"), ""),
        ((*STAGES, "trainer.processes=9", "megatron.context_parallel_size=x"), ""),
    ],
)
def test_a_batch_is_divided_over_the_ranks_that_take_different_samples(overrides, told):
    problems = list(check_batch(load_recipe("", ("trainer.global_batch_size=32", *overrides)), None))
    assert [p.partition("batch_size ")[2] for p in problems] == [told] * bool(told)
