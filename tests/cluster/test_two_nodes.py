"""A whole `slime run` on a Ray cluster of two machines, which is joined by its address."""

import pytest

from tests.equivalence.test_layouts import STEPS
from tests.forked import slime, spawn_slime, succeed
from tests.tiny_run import assert_same_run, sets


@pytest.mark.ray
def test_a_run_on_two_machines_is_the_run_on_one(tmp_path):
    """GPUs are only claimed: engine and trainer are told different ones, and compute on processors."""
    from ray.cluster_utils import Cluster as RayNodes

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    words = ("run", "--recipe", "quickstart", "--run", "r", *sets(f"steps={STEPS}"))
    succeed(*words, folder=tmp_path / "one", run=slime)
    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2, num_gpus=1)
        # the cluster was started in another folder: a path that begins in this one is found all the same
        words = ("./here/r" if word == "r" else word for word in words)
        succeed(*words, "--ray-address", nodes.address, folder=tmp_path / "two", run=spawn_slime)
    finally:
        nodes.shutdown()
    assert_same_run(tmp_path / "one/runs/r", tmp_path / "two/here/r", STEPS)
