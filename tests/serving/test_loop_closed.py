"""The closed loop: a server records conversations, a run learns from them, the server takes up the new weights."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agents.scripted import http
from tests.models import tiny_model
from tests.tiny_run import metrics

ROOT = Path(__file__).parents[2]
SETS = (
    "data.train='live:'",
    "steps=2",
    "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=2",
    "rollout.max_response_tokens=64",
    "data.max_prompt_tokens=192",
    "trainer.global_batch_size=4",
    "trainer.lr=1e-3",
    "trainer.warmup_steps=0",
    "checkpoint.interval=1",
    "checkpoint.keep=1",
    "engine.slots=8",
    "cluster.backend='local'",
    "live.wait_s=120",
    "live.idle_s=100",
)


@pytest.fixture
def slime(tmp_path):
    """Starts a `slime` command in a process of its own; all are gone at the end."""
    started = []
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "SLIME_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    code = "from slimecli.cli import main; main()"

    def start(*words, **more):
        line = [sys.executable, "-c", code, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env={**variables, **more}, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def converse(url, group, reward, turns=2):
    """One conversation with feedback; the versions that spoke."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{group} {turn}?"})
        body = {"messages": messages, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        _, answer, headers = http(f"{url}/v1/chat/completions", body)
        messages.append(answer["choices"][0]["message"])
    told = http(f"{url}/sessions/{headers['x-session-id']}")[1]
    assert told["turns"] == turns, "found again by what was said"
    assert http(f"{url}/feedback", {"session_id": headers["x-session-id"], "reward": reward})[0] == 200
    return told["weight_versions"]


def sets(*extra):
    return [word for item in (*SETS, *extra) for word in ("--set", item)]


@pytest.mark.timeout(700)
def test_serve_record_train_follow(slime, tmp_path):
    model = tiny_model(tmp_path / "model")
    first = slime("run", "--model", str(model), "--run", "talk", "--until", "model", *sets())
    assert first.wait(120) == 0, first.stderr.read()
    server = slime("serve", "--record", "talk", "--follow", "talk", "--port", "0")
    url = json.loads(server.stdout.readline())["url"]
    run = slime("run", "--resume", "--run", "talk")
    spoken = set()
    for number in range(400):
        if run.poll() is not None:
            break
        spoken |= set(converse(url, f"task {number}", reward=float(number % 2)))
    assert run.wait(10) == 0, run.stderr.read()
    assert [m["step"] for m in metrics(tmp_path / "talk")] == [1, 2] and "0" in spoken
    for _ in range(200):
        if http(f"{url}/get_weight_version")[1]["weight_version"] == "2":
            break
        time.sleep(0.1)
    assert converse(url, "after", 1.0) == ["2"], "the new weights answer"
    done = json.loads((tmp_path / "talk/weights/v000002/DONE.json").read_text())
    assert http(f"{url}/weights_fingerprint")[1] == {"fingerprint": done["fingerprint"], "version": "2"}
    server.terminate()
    assert server.wait(60) == 0
    steps = [m for m in metrics(tmp_path / "talk") if "rollout/sessions" in m]
    assert [m["rollout/sessions"] for m in steps] == [4, 4] and all(m["train/grad_norm"] > 0 for m in steps)
    assert all(m["train/logprob_gap"] < 1e-3 or m["rollout/staleness"] > 0 for m in steps)
    assert steps[0]["rollout/staleness"] == 0
    said = [json.loads(x) for p in (tmp_path / "talk/live").glob("sessions_*") for x in p.read_text().splitlines()]
    assert {v for r in said for s in r["samples"] for v in s["weight_versions"]} >= {"0", "2"}


@pytest.mark.timeout(700)
def test_a_conversation_outlives_kill_9_of_its_server(slime, tmp_path):
    model = tiny_model(tmp_path / "model")
    made = slime("run", "--model", str(model), "--run", "talk", "--until", "model", *sets())
    assert made.wait(120) == 0, made.stderr.read()
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True}
    server = slime("serve", "--record", "talk", "--port", "0")
    url = json.loads(server.stdout.readline())["url"]
    _, answer, headers = http(f"{url}/v1/chat/completions", body)
    second = slime("serve", "--record", "talk", "--port", "0")
    assert second.wait(60) == 1 and f"being recorded into by process {server.pid}" in second.stderr.read()
    server.kill()
    server.wait()
    server = slime("serve", "--record", "talk", "--port", "0")
    url = json.loads(server.stdout.readline())["url"]
    body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    _, _, after = http(f"{url}/v1/chat/completions", body)
    assert after["x-session-id"] == headers["x-session-id"], "found again by what was said before the kill"
    ended = http(f"{url}/feedback", {"session_id": after["x-session-id"], "label": "yes"})[1]
    assert ended["samples"] == 1 and ended["tokens"] == 12
    (record,) = [json.loads(x) for p in (tmp_path / "talk/live").glob("sessions_*") for x in p.open()]
    assert record["samples"][0]["metadata"]["turns"] == 2 and record["samples"][0]["label"] == "yes"
