"""GPUs of a Ray cluster held for a run. Ray counts GPUs that are only claimed, so two nodes of four need no device."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimecli.cluster import reservation
from slimecli.errors import SlimeError

ON_RAY = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster as RayNodes
from slimecli import env
from slimecli.cluster import ray_cluster, ray_engines, reservation
from slimecli.placement import Demand, demand_of
from slimecli.cluster.ray_cluster import RayCluster
from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run

env.quiet_ray()
nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, "include_dashboard": False})
nodes.add_node(num_cpus=2, num_gpus=4)
sets = ("trainer.backend='megatron'", "trainer.processes=4", "megatron.tensor-model-parallel-size=4")
recipe = load_recipe("", (*sets, "engine.replicas=3", f"cluster.address='{nodes.address}'"))
run = create_run(sys.argv[1], recipe)
run.new_attempt()

class Where:
    def __init__(self, *args, folder): self.gpus = tuple(args[-1])
    def address(self, one_host): return "127.0.0.1", 1
    def join(self, rank, world, host, port, local_rank): self.local_rank = local_rank
    def open(self, *args): pass
    def close(self): pass
    def look(self): return ray.get_runtime_context().get_node_id(), self.local_rank, self.gpus

ray_cluster.TrainerHost = Where
cluster = RayCluster(recipe, run)
assert not cluster.colocated
group = cluster.open_trainer(recipe, run.root, 1)
found = ray.get([h.look.remote() for h in group._hosts])
assert len({node for node, _, _ in found}) == 1, found
assert [local for _, local, _ in found] == [0, 1, 2, 3] and len({gpus for _, _, gpus in found}) == 4, found
engines = cluster._reserved().engines
assert {p.node for p in engines} == {n["NodeID"] for n in ray.nodes()} - {found[0][0]}, engines
assert len({p.gpus for p in engines}) == 3 and ray.available_resources()["GPU"] == 1.0

began, reservation._TELL_AFTER_S = time.monotonic(), 0.5
try:
    reservation.Reservation(Demand(ranks=2, group=2, engines=(), colocate=False), 2)
    raise AssertionError("there is but one GPU left")
except SlimeError as error:
    assert "gave up after 2 s waiting for GPUs: 2 asked for (on one machine each: 2)" in error.what, error.what
    assert "0 of 4 free" in error.what and "1 of 4 free" in error.what, error.what
assert time.monotonic() - began < 10
assert ray.available_resources()["GPU"] == 1.0, "who gave up holds nothing"

cluster.close()
ray.init(address=nodes.address, log_to_driver=False)
end = time.monotonic() + 20
while ray.available_resources().get("GPU") != 8.0 and time.monotonic() < end:
    time.sleep(0.1)
assert ray.available_resources()["GPU"] == 8.0, "all are given back"

shared = load_recipe("", ("trainer.processes=8", "engine.replicas=2", "engine.backend=sglang", "sglang.tp=4", sets[0]))
assert demand_of(shared, 4, 8).colocate and demand_of(shared, 4, 8).bundles() == [4, 4]
ray.shutdown()

class Engine:
    def __init__(self, tree, model_dir, log, gpus, index, share, folder): self.told = gpus, index, share, log
    def url(self): return "http://127.0.0.1:1"
    def close(self): pass
    def look(self): return ray.get_runtime_context().get_node_id(), *self.told

ray_engines.EngineHost = Engine
spread = ("engine.backend=sglang", "sglang.tp=8", "cluster.gpus_per_machine=4", "engine.router=none")
trained = (sets[0], sets[2], "trainer.processes=8", f"cluster.address='{nodes.address}'")
recipe = load_recipe("", (*spread, *trained))
cluster = RayCluster(recipe, run)
pool = cluster.open_engine(recipe, run.root)
first, second = ray.get([a.look.remote() for a in cluster._actors])
assert first[0] != second[0] and len(first[1]) == len(second[1]) == 4, (first, second)
assert (first[3][:2], second[3][:2]) == ((2, 0), (2, 1)) and first[3][2] == second[3][2], (first, second)
assert int(first[3][2].rpartition(":")[2]) > 1023 and second[4].endswith("engine_0_machine_1.log"), (first, second)
assert len(pool.engines) == 1, "one of them answers"
cluster.close()
nodes.shutdown()
print("held")
"""


@pytest.mark.ray
def test_a_run_holds_its_gpus_and_gives_them_back(tmp_path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", ON_RAY, str(tmp_path / "run")]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.rstrip().endswith("held"), done.stdout[-1000:] + done.stderr[-3000:]
    assert "for GPUs: 2 asked for" in done.stderr, "a wait is explained while it lasts"


def test_a_head_that_is_lost_ends_the_wait_for_gpus(monkeypatch):
    lost, asked = SlimeError("the head is gone", "start it again"), []
    held = reservation.Reservation.__new__(reservation.Reservation)
    held._group = SimpleNamespace(wait=lambda timeout_seconds: asked.append(timeout_seconds))
    monkeypatch.setattr(reservation, "head_error", lambda: lost)
    with pytest.raises(SlimeError, match="the head is gone"):
        held._wait([4], 600.0)
    assert len(asked) == 1
