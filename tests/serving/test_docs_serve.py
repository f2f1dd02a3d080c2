"""The console lines of docs/serve.md work in order; what docs/serve.md and docs/agents.md state is held to the code."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slimecli.agents.tool_calls import FORMATS
from slimecli.recipe import load_recipe
from tests.models import tiny_model
from tests.tiny_run import metrics

ROOT = Path(__file__).parents[2]
SERVE = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
SMALL = {
    "steps = 100": "steps = 1",
    "batch_size = 8 ": "batch_size = 1 ",
    "max_response_tokens = 1024": "max_response_tokens = 32",
    "max_prompt_tokens = 1024": "max_prompt_tokens = 96",
    "global_batch_size = 16": "global_batch_size = 2",
    "wait_s = 86400": "wait_s = 60",
}


def block(text, kind):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def listens(port, deadline):
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)


@pytest.mark.timeout(700)
def test_console_lines_of_serve(tmp_path):
    tiny_model(tmp_path / "my-model")
    (recipe,) = block(SERVE, "toml")
    for large, small in SMALL.items():
        assert large in recipe
        recipe = recipe.replace(large, small)
    (tmp_path / "live.toml").write_text(recipe + '[cluster]\nbackend = "local"\n')
    program = tmp_path / "bin" / "slime"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom slimecli.cli import main\nmain()\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env.pop("SLIME_RUNS", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (lines,) = block(SERVE, "console")
    background = []
    try:
        for line in lines.splitlines():
            command = line.removeprefix("$ ").replace("8000", str(port))
            if command.endswith("&"):
                words = shlex.split(command.removesuffix("&"))
                background.append(subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
                listens(port, time.monotonic() + 120)
                continue
            done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
            if command.startswith("curl"):
                assert "error" not in json.loads(done.stdout), done.stdout
    finally:
        for process in background:
            process.terminate()
            process.wait(60)
    (step,) = [m for m in metrics(tmp_path / "runs/talk") if m["step"] == 1]
    assert step["rollout/reward"] == 0.5 and step["rollout/sessions"] == 2 and step["train/grad_norm"] > 0
    (record, _) = map(json.loads, (tmp_path / "runs/talk/live/sessions_000001.jsonl").read_text().splitlines())
    assert record["session_id"] == "anna" and record["samples"][0]["reward"] == 1.0


def test_the_recipe_of_the_page_is_valid_as_it_stands(tmp_path):
    (recipe,) = block(SERVE, "toml")
    (tmp_path / "live.toml").write_text(recipe)
    loaded = load_recipe(str(tmp_path / "live.toml"))
    assert loaded.data.is_live and loaded.live.max_staleness == 4


def test_the_table_of_tool_forms_is_complete():
    named = re.findall(r"^\| `([a-z0-9_]+)` \|", AGENTS, re.MULTILINE)
    assert named == list(FORMATS)


def test_the_generate_function_of_the_page_runs(tmp_path):
    import asyncio
    import types

    from slimecli.agents import server as module
    from slimecli.types import Sample
    from tests.agents.scripted import http, scripted

    (code,) = block(AGENTS, "python")
    own, text = scripted(tmp_path, "Hello back")
    server = module.AgentServer(text)

    def my_agent(base_url, api_key, prompt):
        body = {"messages": [{"role": "user", "content": prompt}]}
        assert http(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})[0] == 200

    names = {"my_agent": my_agent}
    exec(code, names)
    names["agent_server"] = lambda args: server
    try:
        (sample,) = asyncio.run(names["generate"](types.SimpleNamespace(), Sample(prompt="Hi", index=1), {"top_k": 5}))
    finally:
        server.close()
    assert sample.response.startswith("Hello back") and own.asked[0]["sampling_params"]["top_k"] == 5
