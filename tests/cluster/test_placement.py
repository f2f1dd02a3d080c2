"""Ranks of a group on one machine, in the order of the machines: as arithmetic, and on a Ray of two nodes."""

import subprocess
import sys
from pathlib import Path

import pytest

from slimecli.errors import UsageError
from slimecli.placement import Bundle, Demand, Node, Place, assign, demand_of, place_ranks
from slimecli.recipe import load_recipe

FAR, NEAR = Node("far", "10.0.0.10", 4), Node("near", "10.0.0.9", 4)


def test_one_machine_takes_all_whatever_its_room():
    assert place_ranks(3, 2, [Node("a", "10.0.0.1", 1)]) == [Place("", 0), Place("", 1), Place("", 2)]


def test_machines_are_filled_in_the_order_of_their_addresses():
    places = place_ranks(6, 2, [FAR, NEAR])
    assert [p.node for p in places] == ["near"] * 4 + ["far"] * 2
    assert [p.local_rank for p in places] == [0, 1, 2, 3, 0, 1]


def test_a_group_is_never_on_two_machines():
    places = place_ranks(4, 2, [Node("a", "10.0.0.1", 3), Node("b", "10.0.0.2", 3)])
    assert [p.node for p in places] == ["a", "a", "b", "b"]
    named = place_ranks(2, 1, [Node("1", "beta", 1), Node("2", "alpha", 1)])
    assert [p.node for p in named] == ["2", "1"]


def test_too_little_room_is_told_in_numbers():
    with pytest.raises(UsageError, match=r"in groups of 4 .* has room for 4 \(10.0.0.1 5, 10.0.0.2 3\)"):
        place_ranks(8, 4, [Node("b", "10.0.0.2", 3), Node("a", "10.0.0.1", 5)])


def demand(**given):
    return Demand(**{"ranks": 4, "group": 2, "engines": (1, 1), "colocate": False, **given})


@pytest.mark.parametrize(
    ("given", "bundles"),
    [
        ({}, [2, 2, 1, 1]),
        ({"engines": (4, 1)}, [2, 2, 4, 1]),
        ({"colocate": True}, [2, 2]),
        ({"colocate": True, "engines": (4, 4)}, [4, 4]),
        ({"colocate": True, "engines": (1,) * 8}, [2, 2, 2, 2]),
        ({"engines": (), "colocate": True}, [2, 2]),
        ({"ranks": 1, "group": 8, "engines": (1,), "colocate": True}, [1]),
    ],
)
def test_bundles_hold_groups_and_engines_together(given, bundles):
    assert demand(**given).problem() == ""
    assert demand(**given).bundles() == bundles


def test_demands_that_do_not_share_out_are_told():
    assert "not whole groups of 4" in demand(ranks=6, group=4).problem()
    assert "do not share out evenly" in demand(colocate=True, engines=(3, 1)).problem()
    assert demand(engines=(3, 1)).problem() == ""


def test_each_process_has_gpus_of_its_own():
    held = [Bundle("far", "10.0.0.10", (0, 1)), Bundle("near", "10.0.0.9", (2, 3)), Bundle("far", "10.0.0.10", (5,))]
    ranks, engines = assign(demand(engines=(1,)), held)
    assert ranks == [Place("near", 0, (2,)), Place("near", 1, (3,)), Place("far", 0, (0,)), Place("far", 1, (1,))]
    assert engines == [Place("far", 0, (5,))]


def test_colocated_engines_lie_across_the_trainers_gpus():
    held = [Bundle("far", "10.0.0.10", (4, 5, 6, 7)), Bundle("near", "10.0.0.9", (0, 1, 2, 3))]
    ranks, engines = assign(demand(ranks=8, engines=(4, 2, 1), colocate=True), held)
    assert [p.node for p in ranks] == ["near"] * 4 + ["far"] * 4
    assert [p.gpus for p in ranks] == [(i,) for i in range(8)]
    assert engines == [Place("near", 0, (0, 1, 2, 3)), Place("far", 0, (4, 5)), Place("far", 1, (6,))]
    small_first = assign(demand(ranks=8, engines=(1, 2, 4), colocate=True), held)[1]
    assert [p.gpus for p in small_first] == [(6,), (4, 5), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("gpus", "placement", "colocate"),
    [(0, "auto", False), (1, "auto", True), (2, "auto", False), (2, "colocated", True), (1, "disaggregated", False)],
)
def test_who_shares_gpus(gpus, placement, colocate):
    recipe = load_recipe("", (f"cluster.placement={placement}",))
    assert demand_of(recipe, 1, gpus).colocate is colocate


def test_generation_beside_training_never_shares_gpus():
    ahead = load_recipe("", ("rollout.max_staleness=1",))
    assert not demand_of(ahead, 1, 1).colocate and demand_of(ahead, 1, 1).bundles() == [1, 1]


def test_an_engine_counts_its_gpus():
    sglang = ("engine.backend=sglang", "sglang.tp-size=4", "sglang.pp_size=2")
    assert load_recipe("", sglang).gpus_per_engine == 8
    assert load_recipe("", sglang[1:]).gpus_per_engine == 1, "the embedded engine has one"


ON_RAY = """
import ray, sys
from pathlib import Path
from ray.cluster_utils import Cluster as RayNodes
from slimecli import env
from slimecli.cluster.ray_cluster import RayCluster
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run

env.quiet_ray()
nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes.add_node(num_cpus=2)
sets = ("trainer.backend='megatron'", "trainer.processes=4", "megatron.tensor-model-parallel-size=2")
recipe = load_recipe("", (*sets, f"cluster.address='{nodes.address}'"))
run = create_run(sys.argv[1], recipe)
run.new_attempt()
cluster = RayCluster(recipe, run)

class Where:
    def __init__(self, *args, folder): self.local_rank = None
    def address(self, one_host): return "127.0.0.1", 1
    def join(self, rank, world, host, port, local_rank): self.local_rank = local_rank
    def open(self, *args): pass
    def close(self): pass
    def look(self): return ray.get_runtime_context().get_node_id(), self.local_rank

import slimecli.cluster.ray_cluster as module
module.TrainerHost = Where
group = cluster.open_trainer(recipe, Path("."), 1)
found = ray.get([h.look.remote() for h in group._hosts])
ids = [node for node, _ in found]
assert ids[0] == ids[1] != ids[2] == ids[3], found
assert [local for _, local in found] == [0, 1, 0, 1], found
cluster.close()
nodes.shutdown()
print("placed")
"""


@pytest.mark.ray
def test_tensor_parallel_ranks_share_a_node_of_a_cluster(tmp_path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", ON_RAY, str(tmp_path / "run")]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=150)
    assert done.stdout.rstrip().endswith("placed"), done.stdout[-1000:] + done.stderr[-3000:]
