"""Which servers a run starts, and what is wrong with a topology."""

import pytest

from slimecli.errors import RecipeError
from slimecli.placement import demand_of
from slimecli.recipe import load_recipe, validate_recipe
from slimecli.topology import model_servers, policy_servers, servers_of, topology_problems

SGLANG = {"engine": {"backend": "sglang"}, "sglang": {"tp-size": 2, "mem-fraction-static": 0.7}}
PD = [
    {"kind": "prefill", "replicas": 2, "sglang": {"tp_size": 4}},
    {"kind": "decode", "sglang": {"mem_fraction_static": 0.9}},
]


def recipe(engine=None, **sections):
    tree = {**SGLANG, **sections, "engine": {**SGLANG["engine"], **(engine or {})}}
    return validate_recipe(tree)


def test_replicas_are_equal_servers():
    servers = policy_servers(recipe({"replicas": 3}))
    assert [(s.model, s.kind, s.gpus) for s in servers] == [("", "regular", 2)] * 3
    assert servers[0].recipe.sglang == {"tp_size": 2, "mem_fraction_static": 0.7}


def test_groups_have_arguments_of_their_own_over_the_common_ones():
    servers = policy_servers(recipe({"groups": PD}))
    assert [(s.kind, s.gpus) for s in servers] == [("prefill", 4), ("prefill", 4), ("decode", 2)]
    prefill, decode = servers[0].recipe.sglang, servers[2].recipe.sglang
    assert [s.bootstrap_port for s in servers] == [8998, 8999, 0], "two servers of a machine have a door each"
    door = {"disaggregation_bootstrap_port": 8998}
    assert prefill == {"tp_size": 4, "mem_fraction_static": 0.7, "disaggregation_mode": "prefill", **door}
    assert decode == {"tp_size": 2, "mem_fraction_static": 0.9, "disaggregation_mode": "decode"}


def test_the_port_of_a_door_is_the_one_that_is_given_or_one_after_it():
    def doors(*groups, **common):
        made = recipe({"groups": [*groups, {"kind": "decode"}]}, sglang=common)
        return [s.bootstrap_port for s in policy_servers(made)]

    two, own = {"kind": "prefill", "replicas": 2}, {"disaggregation-bootstrap-port": 9100}
    assert doors(two, two) == [8998, 8999, 9000, 9001, 0]
    assert doors(two, **{"disaggregation-bootstrap-port": 9500}) == [9500, 9501, 0]
    assert doors(two, {**two, "sglang": own}) == [8998, 8999, 9100, 9101, 0]


def test_frozen_models_are_servers_besides():
    model = {"name": "judge", "path": "/m", "replicas": 2, "slots": 5, "max_context": 99, "sglang": {"tp": 1}}
    made = recipe({"models": [model], "slots": 7})
    first, second = model_servers(made)
    assert (first.model, first.path, first.recipe.engine.slots, first.recipe.engine.max_context) == (
        "judge",
        "/m",
        5,
        99,
    )
    assert second.recipe.engine.replicas == 1 and second.recipe.engine.models == []
    assert len(servers_of(made)) == 3 and demand_of(made, 1, 0).engines == (2, 1, 1)
    served = recipe({"models": [model], "urls": ["http://x"]})
    assert [s.model for s in servers_of(served)] == ["judge", "judge"], "the policy is served already"
    assert servers_of(recipe({"models": [model]}, steps=0)) == [], "SFT alone asks nobody"


JUDGE = {"name": "judge", "path": "/m"}


@pytest.mark.parametrize(
    ("engine", "sections", "expected"),
    [
        ({"backend": "embedded", "groups": [{}]}, {}, "are servers of SGLang"),
        ({"replicas": 2, "groups": [{}]}, {}, "`engine.replicas` has no effect"),
        ({"urls": ["http://x"], "groups": [{}]}, {}, "leave one of them empty"),
        ({"groups": PD[:1]}, {}, "neither works without the other"),
        ({"groups": [*PD, {}]}, {}, "mixes regular servers"),
        ({"groups": PD, "router": "builtin"}, {}, "knows no prefill and decode servers"),
        ({"models": [JUDGE, JUDGE]}, {}, "two of the name 'judge'"),
        ({"models": [JUDGE]}, {"distill": {"url": "model:teacher"}}, "has no 'teacher' (it has: judge)"),
        ({}, {"reward": {"judge": {"url": "model:judge"}}}, "has no 'judge' (it has: none)"),
        ({"models": [{**JUDGE, "name": "../judge"}]}, {}, "cannot call one '../judge'"),
        ({"models": [{**JUDGE, "name": "engine"}]}, {}, "cannot call one 'engine'"),
        ({"models": [JUDGE]}, {"cluster": {"backend": "local"}}, "'local' is one process"),
    ],
)
def test_each_contradiction_is_the_one_problem_told(engine, sections, expected):
    (problem,) = topology_problems(recipe(engine, **sections))
    assert expected in problem


def test_what_goes_together_is_let_through():
    assert list(topology_problems(load_recipe(""))) == []
    assert list(topology_problems(recipe({"groups": PD, "router": "smg"}))) == []
    assert list(topology_problems(recipe({"models": [JUDGE]}, distill={"url": "model:judge"}))) == []


def test_a_misspelt_field_of_a_group_is_named():
    with pytest.raises(RecipeError, match="engine.groups.0.kinds"):
        recipe({"groups": [{"kinds": "prefill"}]})
