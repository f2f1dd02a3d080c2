"""Several engines behind one address: processes of their own, replaced when they die, gone when the server is."""

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimecli.engines import api_key
from slimecli.protocols import WeightUpdate
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir
from slimecli.serving.fleet import EmbeddedWorker, ProcessFleet
from slimecli.serving.follow import Follower
from tests.agents.scripted import http
from tests.models import tiny_model
from tests.serving.test_follow import commit

ROOT = Path(__file__).parents[2]
KEY = {"Authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("model"))
    words = ["serve", "--model", str(model), "--port", "0", "--replicas", "2", "--router", "builtin"]
    words += ["--api-key-env", "SERVE_KEY", "--set", "engine.max_context=400", "--set", "engine.slots=8"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "SERVE_KEY": "s3cret", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", "from slimecli.cli import main; main()", *words]
    process = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = json.loads(process.stdout.readline() or json.dumps({"url": process.stderr.read()}))["url"]
    yield process, url
    process.kill()
    process.wait()


def chat(url, text, **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True, **more}
    status, answer, _ = http(f"{url}/v1/chat/completions", body, KEY)
    assert status == 200, answer
    return answer


def children(pid):
    """Process number -> command line of everything that a process started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = (path.parent / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found[int(path.parent.name)] = line
    return found


@pytest.mark.timeout(700)
def test_two_engines_answer_alike_survive_one_and_go_with_the_server(served):
    process, url = served
    own = children(process.pid)
    engines = [pid for pid, line in own.items() if "slimecli.engines.embedded" in line]
    assert len(engines) == 2 and len(own) == 3, "two engines and a router"
    assert not any("s3cret" in word for line in own.values() for word in line), "no key shows in ps"
    assert "s3cret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
    assert http(f"{url}/v1/models")[0] == 401 and http(f"{url}/health", headers=KEY)[0] == 200
    assert http(f"{url}/v1/models", headers={"x-api-key": "s3cret"})[1]["data"][0]["max_model_len"] == 400
    behind = http(f"{url}/v1/loads", headers=KEY)[1]["engines"]
    assert len(behind) == 2 and {http(f"{one}/server_info")[0] for one in behind} == {401}, (
        "nobody goes round the front"
    )
    assert http(f"{url}/server_info", headers=KEY)[1]["context_length"] == 400

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: chat(url, "same", temperature=0), range(16)))
    assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1
    body = {"messages": [{"role": "user", "content": "same"}], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    _, events, _ = http(f"{url}/v1/chat/completions", {**body, "stream": True}, KEY)
    said = [e["choices"][0]["delta"].get("content", "") for e in events]
    assert "".join(said) == answers[0]["choices"][0]["message"]["content"] and len(events) > 3, "token by token"
    claude = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert http(f"{url}/v1/messages", claude, KEY)[1]["usage"]["output_tokens"] > 0

    os.kill(engines[0], signal.SIGKILL)
    for _ in range(10):
        chat(url, "go on")
        time.sleep(0.1)
    deadline = time.monotonic() + 120
    while sum("slimecli.engines.embedded" in line for line in children(process.pid).values()) < 2:
        assert time.monotonic() < deadline, "a new engine takes its place"
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in own)


@pytest.mark.timeout(700)
def test_servers_that_ask_for_a_key_are_shown_it(tmp_path, monkeypatch):
    """SGLang's ask for engine.api_key_env: every client behind the front has it."""
    monkeypatch.setenv("SERVE_KEY", "s3cret")
    model = tiny_model(tmp_path / "model")
    sets = ("engine.slots=4", "engine.max_context=128", "engine.api_key_env='SERVE_KEY'", "engine.replicas=2")
    recipe = load_recipe(overrides=sets)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "sglang"})})

    def start(recipe, model_dir, *, log, **rest):
        return EmbeddedWorker(recipe, model_dir, log, key=api_key(recipe))

    monkeypatch.setattr("slimecli.engines.sglang.launch.start_server", start)
    ask = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}

    async def work():
        fleet = ProcessFleet(recipe, model, tmp_path / "logs")
        try:
            whole = await fleet.text.generate(ask)
            parts = [item async for item in fleet.text.stream(ask)]
            await fleet.update(WeightUpdate(kind="disk", version=3, folder=model))
        finally:
            await fleet.close()
        return whole[0], parts[-1]

    for reply in asyncio.run(work()):
        assert reply["meta_info"]["completion_tokens"] == 2


@pytest.mark.timeout(700)
def test_weights_reach_every_replica_and_those_that_come_later(tmp_path):
    sets = ("engine.slots=4", "engine.max_context=128", "engine.replicas=2", "engine.router='builtin'")
    run = RunDir(tmp_path / "run")
    run.live_dir.mkdir(parents=True)

    async def work():
        fleet = ProcessFleet(load_recipe(overrides=sets), tiny_model(tmp_path / "model"), tmp_path / "logs")
        watching = asyncio.ensure_future(fleet.watch())
        try:
            mark = commit(run, 3, seed=3)
            assert await Follower(run, fleet, version=0, timeout_s=60).look()
            first = fleet.urls
            os.kill(fleet._workers[0]._process.pid, signal.SIGKILL)
            while fleet.urls == first or len(fleet.urls) < 2:
                await asyncio.sleep(0.1)
            async with fleet._busy:
                held = [
                    await fleet._clients[url].call("GET", "/weights_fingerprint", None, "asked") for url in fleet.urls
                ]
            assert held == [{"fingerprint": mark, "version": "3"}] * 2
            ask = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}, "routing_key": "a"}
            assert (await fleet.text.generate(ask))[0]["meta_info"]["weight_version"] == "3"
        finally:
            watching.cancel()
            await fleet.close()
        return fleet

    fleet = asyncio.run(work())
    assert not any(worker.alive() for worker in fleet._workers.values())
