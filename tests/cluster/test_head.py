"""The head of a joined cluster dies: who waits is told by us, before Ray ends the process after its minute."""

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from slimecli import env
from slimecli.cluster import ray_head
from slimecli.cluster.ray_wait import wait
from slimecli.errors import SlimeError

ray_head.LOOK_S, ray_head.LOST_S = 0.2, 2.0
env.quiet_ray()
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
far = nodes.add_node(num_cpus=1)
ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
sys.excepthook = sys.__excepthook__  # Ray's own asks the head, for a minute

class Worker:
    def rest(self, seconds): time.sleep(seconds); return seconds

there = NodeAffinitySchedulingStrategy(far.node_id, soft=False)
worker = ray.remote(num_cpus=0, scheduling_strategy=there)(Worker).remote()
head, told = ray_head.watch_head(), []
head.tell(told.append)
address = nodes.address
assert wait([worker.rest.remote(3.0)], "a worker", 60) == [3.0], "a head that is there is no trouble"
assert ray_head.head_error() is None

killed = []
def kill():
    killed.append(time.monotonic())
    nodes.head_node.kill_gcs_server(check_alive=False)
threading.Timer(0.5, kill).start()
try:
    wait([worker.rest.remote(600.0)], "a worker", 600)
except SlimeError as error:
    seconds = time.monotonic() - killed[0]
    assert f"the head of the Ray cluster at {address} is gone" in error.what, error
    assert "Connection refused" in error.what and "slime run --resume" in error.fix, error
    assert told == [error], told
    assert seconds < 20, seconds
    print("all good", flush=True)
for node in (nodes.head_node, far):
    node.kill_all_processes(check_alive=False, allow_graceful=False)
os._exit(0)  # Ray's own end asks the head, too
"""


def test_a_head_that_dies_ends_the_wait_with_its_address():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=200)
    assert "all good" in done.stdout, done.stderr[-3000:]
