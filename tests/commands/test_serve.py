"""`slime serve` as its users meet it: a free port, OpenAI's endpoints behind a key, an end that drops nobody."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.models import tiny_model


@pytest.fixture
def served(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    words = ("serve", "--model", str(folder), "--port", "0", "--api-key", "s3cret", "--set", "engine.max_context=4096")
    code = "from slimecli.cli import main; main()"
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process, json.loads(process.stdout.readline())["url"]
    process.kill()
    process.wait()


def ask(url, tokens, key="s3cret"):
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def running(url, key="s3cret"):
    """Requests that the server is answering."""
    request = urllib.request.Request(f"{url}/v1/loads", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["num_running_reqs"]


def test_serve_chats_demands_its_key_and_ends_without_dropping_an_answer(served):
    process, url = served
    assert url.startswith("http://127.0.0.1:") and not url.endswith(":0"), "loopback, on a port that is told"
    answer = ask(url, 5)
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["usage"]["completion_tokens"] == 5
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, 5, key="guess")
    assert refused.value.code == 401

    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(ask, url, 1500)
        while not running(url):
            assert not long.done()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert long.result(60)["usage"]["completion_tokens"] == 1500
    assert process.wait(30) == 0
    with pytest.raises(urllib.error.URLError):
        ask(url, 5)


def test_a_second_signal_cuts_answers_short(served):
    process, url = served
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(ask, url, 3900)
        while not running(url):
            assert not long.done()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        told = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert 0 < long.result(30)["usage"]["completion_tokens"] < 3900, "what there was is answered"
    assert "finishing 1 request(s)" in told[1]
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--port", "99999"), "less than or equal to 65535"),
        (("--router", "builtin", "--set", "router.polcy=x"), "did you mean 'policy'"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(tmp_path, words, told):
    line = [sys.executable, "-m", "slimecli", "serve", "--model", str(tiny_model(tmp_path)), *words]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and told in done.stderr and "fix:" in done.stderr, done.stderr
    assert "router: " not in done.stderr and not done.stdout
