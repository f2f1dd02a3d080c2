"""Servers are started, watched and ended: with a made-up SGLang whose server only answers its health check."""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from slimecli.engines.sglang import cpu, launch, serve
from slimecli.errors import SlimeError
from slimecli.recipe import load_recipe
from tests.engines.sglang.made import overrides


@pytest.fixture
def start(made_up, models, tmp_path):
    """start(*overrides) -> a server, closed at the end."""
    begun = []

    def begin(*more, **where):
        recipe = load_recipe("", overrides(made_up, "engine.start_timeout_s=120", *more))
        server = launch.start_server(recipe, models("qwen3"), log=tmp_path / "logs" / "server.log", **where)
        begun.append(server)
        return server

    yield begin
    for server in begun:
        server.close()


def told(server):
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
        return json.loads(answer.read())


def is_gone(pid, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_server_runs_with_what_it_was_given_and_ends_with_all_its_processes(start, models, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    server = start("engine.api_key_env=ENGINE_KEY", index=4)
    found = told(server)
    words = found["argv"]
    assert words[words.index("--model-path") + 1] == str(models("qwen3"))
    assert f"http://127.0.0.1:{words[words.index('--port') + 1]}" == server.url
    assert words[words.index("--random-seed") + 1] == "4"
    assert (found["threads"], found["rank"], found["cpu"]) == ("1", None, "1")
    assert words[-2:] == ["--api-key", "s3cret"], "the key reaches the server"
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert b"s3cret" not in command, "but not where every user can read it"
    assert server.alive() and found["child"] in serve.members(server.pid)
    assert any("listening" in line for line in server.log_lines())
    server.close()
    server.close()
    assert not server.alive() and is_gone(found["child"]) and serve.members(server.pid) == []


def test_a_machines_share_of_a_server(start, monkeypatch):
    found = told(start("sglang.tp_size=2", share=(2, 1, "127.0.0.1:20100")))
    words = dict(itertools.pairwise(found["argv"]))
    assert (words["--nnodes"], words["--node-rank"], words["--dist-init-addr"]) == ("2", "1", "127.0.0.1:20100")
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert found["bound"] == f"{processors}|{processors}", "SGLang asks where more ranks than NUMA nodes run"
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    assert told(start("sglang.tp_size=2"))["bound"] == "0|1"
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    assert told(start())["bound"] is None


def test_a_library_that_is_not_there_is_found_by_its_name():
    """What Mooncake is linked with is loaded before it; the loader asks for no file of that name then."""
    name = f"libslime-{os.getpid()}.so.1"
    with pytest.raises(OSError, match="No such file"):
        ctypes.CDLL(name)
    file = os.memfd_create(name)
    os.write(file, cpu.empty_library(name))
    ctypes.CDLL(f"/proc/self/fd/{file}")
    os.close(file)
    with pytest.raises(AttributeError, match="undefined symbol: ibv_open_device"):
        _ = ctypes.CDLL(name).ibv_open_device


def test_only_the_models_own_module_is_imported_on_a_cpu(made_up, models):
    assert list(launch._other_models(Path(made_up).parent / "site" / "sglang", models("qwen3"))) == ["mixtral"]


def test_why_a_server_did_not_start(start):
    with pytest.raises(SlimeError) as error:
        start("sglang.enable_metrics=true")
    assert "ended with 1: ValueError: metrics are out of order" in error.value.what
    assert "server.log" in error.value.fix


def test_a_server_that_never_answers(start, tmp_path):
    with pytest.raises(SlimeError, match="did not answer its health check within 4 s"):
        start("sglang.max_total_tokens=1", "engine.start_timeout_s=4")
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in p.read_bytes()]


def test_a_port_that_is_taken_is_replaced_by_another(start, monkeypatch):
    import socket

    real, asked = launch.free_port, []
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def port(host):
            asked.append(host)
            return taken.getsockname()[1] if len(asked) == 1 else real(host)

        monkeypatch.setattr(launch, "free_port", port)
        # the one that holds the port answers nothing: without a look at the process this would wait for its deadline
        server = start()
    assert told(server) and len(asked) == 4


def test_a_port_of_ones_own_is_not_replaced(start):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SlimeError, match="[Aa]ddress already in use"):
        start(port=taken.getsockname()[1])


def test_a_server_that_is_gone_before_it_is_told_its_key_says_how(start, monkeypatch, made_up):
    (made_up.parent / "site/torch.py").write_text("raise SystemExit('RuntimeError: no torch')")
    real = subprocess.Popen

    def popen(line, **how):
        process = real(line, **how)
        if Path(line[1]) == launch.HERE / "cpu.py":
            process.wait(60)
        return process

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    with pytest.raises(SlimeError, match="SGLang did not start.*no torch"):
        start()


def test_a_server_that_dies_says_how(start):
    server = start()
    os.kill(server.pid, signal.SIGKILL)
    server._process.wait(60)  # a zombie whose threads are still ending cannot be waited for yet
    assert not server.alive()
    assert f"{server.url} was ended by signal 9" in server.trouble()


def test_a_server_does_not_outlive_a_killed_slime(made_up, models, tmp_path):
    """The starter is killed with no chance to clear up; the kernel closes its end of the pipe."""
    code = f"""
import sys
from pathlib import Path
from slimecli.engines.sglang.launch import start_server
from slimecli.recipe import load_recipe
recipe = load_recipe("", {overrides(made_up)!r})
server = start_server(recipe, Path({str(models("qwen3"))!r}), log=Path({str(tmp_path / "log")!r}))
print(server.pid, flush=True)
sys.stdin.read()
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    leader = int(starter.stdout.readline())
    processes = serve.members(leader)
    assert len(processes) == 2
    starter.kill()
    starter.wait()
    assert all(is_gone(pid) for pid in processes)


def test_what_sglang_leaves_in_shared_memory_is_told_by_its_owner(tmp_path):
    """A file of this process group is found, one that nobody of it has mapped is not."""
    import mmap

    mine, other = (serve.SHARED / f"sglang_loads_test_{os.getpid()}_{name}.shm" for name in ("mine", "other"))
    for path in (mine, other):
        path.write_bytes(b"x" * 4096)
    try:
        with mine.open("r+b") as handle, mmap.mmap(handle.fileno(), 0):
            found = serve.leftovers(os.getpgrp())
        assert mine in found and other not in found
    finally:
        mine.unlink()
        other.unlink()
