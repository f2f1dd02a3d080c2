"""Waiting for Ray: every wait has a name, a deadline and ends with the first failure. One Ray, in its own process."""

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, time
import ray
from slimecli import env
from slimecli.cluster.ray_cluster import _start_ray
from slimecli.cluster.ray_trainer import TrainerGroup
from slimecli.cluster.ray_wait import wait
from slimecli.placement import Place
from slimecli.errors import GateError, SlimeError
from slimecli.recipe import load_recipe

class Worker:
    def address(self, one_host): return "127.0.0.1", 1
    def join(self, *args): return None
    def echo(self, value, seconds=0.0): time.sleep(seconds); return value
    def refuse(self): raise GateError("the worker says no", "mend it")
    def step(self, batch): raise ZeroDivisionError("a bug")
    def save(self, folder): os._exit(1)
    def lose(self): raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    def die(self): time.sleep(1); os._exit(1)
    def load(self, folder): time.sleep(600)
    def close(self): return None

def caught(act):
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        return error, time.monotonic() - start
    raise AssertionError("nothing was raised")

def unreachable(**kwargs): raise ConnectionError("nobody there")

real, ray.init = ray.init, unreachable
error, _ = caught(lambda: _start_ray(load_recipe("", ("cluster.address='10.0.0.1:6379'",))))
assert type(error) is SlimeError and "joined at '10.0.0.1:6379': nobody there" in error.what, error
ray.init = real

env.quiet_ray()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
make = ray.remote(num_cpus=0, max_restarts=0)(Worker).remote
a, b, c, slow = make(), make(), make(), make()
group = TrainerGroup([c], 60.0, [Place("", 0)], one_host=True)

assert wait([a.echo.remote(1, 0.2), b.echo.remote(2)], "two answers", 60) == [1, 2], "answers keep their order"

error, seconds = caught(lambda: wait([slow.echo.remote(1, 3.0)], "the slow one", 0.3))
assert type(error) is SlimeError and "0.3 s waiting for the slow one" in error.what, error
assert seconds < 2, seconds

error, seconds = caught(lambda: wait([slow.echo.remote(1, 30.0), b.refuse.remote()], "both", 60))
assert type(error) is GateError and error.what == "the worker says no" and error.fix == "mend it", error
assert seconds < 10, "a failure waits for nobody"

import slimecli.cluster.ray_trainer, slimecli.cluster.ray_wait
victim, late = make(), make()
error, seconds = caught(lambda: wait([a.lose.remote(), victim.die.remote()], "both", 60))
assert type(error) is SlimeError and "a worker process died while we waited for both" in error.what, error
assert seconds < 10, "the cause of a lost connection is found soon"
error, _ = caught(lambda: wait([a.lose.remote(), late.refuse.remote()], "both", 60))
assert type(error) is GateError, error
slimecli.cluster.ray_wait._CAUSE_S = 0.5
error, _ = caught(lambda: wait([a.lose.remote(), late.echo.remote(1, 3.0)], "both", 60))
assert type(error) is SlimeError and "lost the others while we waited for both" in error.what, error

class Unmade:
    def __init__(self, error): raise error
    def url(self): return None
unmade = ray.remote(num_cpus=0)(Unmade).remote
error, _ = caught(lambda: wait([unmade(GateError("no memory", "take less")).url.remote()], "it", 60))
assert type(error) is GateError and (error.what, error.fix) == ("no memory", "take less"), error
error, _ = caught(lambda: wait([unmade(ZeroDivisionError("a bug")).url.remote()], "it", 60))
told = "a worker process could not start while we waited for it: ZeroDivisionError: a bug"
assert type(error) is SlimeError and error.what == told and "in __init__" in str(error.__cause__), error

error, _ = caught(lambda: group.step(type("Batch", (), {"to_numpy": lambda self: {}})()))
assert isinstance(error, ZeroDivisionError), "a bug keeps its kind and traceback"

error, _ = caught(lambda: group.save("/nowhere"))
assert type(error) is SlimeError and "died while we waited for the trainer to save" in error.what, error
assert "--resume" in error.fix
group.close()  # the death is told already; closing must not tell it again in place of the first error

busy = TrainerGroup([b], 60.0, [Place("", 0)], one_host=True)
slimecli.cluster.ray_trainer._WORK_DEADLINE_S = 0.3
caught(lambda: busy.load("/slow"))
start = time.monotonic()
busy.close()
assert time.monotonic() - start < 1, "closing waited for a call that hangs"
ray.shutdown()
print("all good")
"""


def test_waits_end_as_they_say():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.rstrip().endswith("all good"), done.stderr[-3000:]
