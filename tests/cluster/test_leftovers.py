"""What a server keeps in /dev/shm is gone when the run is: Ray alone would kill the server before it can clear up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli.engines.sglang.serve import SHARED
from tests.engines.sglang import made
from tests.models import tiny_model

CODE = """
import asyncio, sys
from pathlib import Path
from slimecli.cluster.ray_cluster import RayCluster
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir

root, *sets = sys.argv[1:]
run, recipe = RunDir(Path(root)), load_recipe("", tuple(sets))
run.new_attempt()
cluster = RayCluster(recipe, run)
pool = cluster.open_engine(recipe, run.model_dir)
before = set(Path("/dev/shm").glob("sglang_loads_MARK_*"))
print("there", *before, flush=True)
cluster._engines[0]._respawn(0)
after = set(Path("/dev/shm").glob("sglang_loads_MARK_*"))
print("then", *after, flush=True)
asyncio.run(pool.close())
cluster.close()
print("closed", *Path("/dev/shm").glob("sglang_loads_MARK_*"), flush=True)
"""
STATES = ("there", "then", "closed")
KEEPS = """
import mmap, os
path = f"/dev/shm/sglang_loads_MARK_{os.getpid()}.shm"
with open(path, "wb") as file: file.write(bytes(16384))
with open(path, "r+b") as file: held = mmap.mmap(file.fileno(), 0)
"""


@pytest.mark.ray
def test_shared_memory_of_servers_is_given_back(tmp_path):
    mark = f"test{os.getpid()}"
    python = made.installation(tmp_path, sys.executable)
    server = tmp_path / "site" / "sglang" / "launch_server.py"
    server.write_text(KEEPS.replace("MARK", mark) + server.read_text())
    tiny_model(tmp_path / "run" / "model" / "hf")
    words = [
        sys.executable,
        "-c",
        CODE.replace("MARK", mark),
        str(tmp_path / "run"),
        *made.overrides(python, "cluster.backend=ray"),
    ]
    try:
        done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
        told = dict(line.partition(" ")[::2] for line in done.stdout.splitlines() if line.split(" ")[0] in STATES)
        assert told.keys() == set(STATES), done.stderr[-3000:]
        first, second, last = (told[state].split() for state in STATES)
        assert len(first) == len(second) == 1 and first != second, "of the server that was replaced nothing is left"
        assert last == []
    finally:
        for path in SHARED.glob(f"sglang_loads_{mark}_*"):
            path.unlink()
