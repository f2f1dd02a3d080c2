"""One engine over two machines: real SGLang ranks of one server in two places, and what both are given."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimecli.engines.http import HttpEngine
from slimecli.engines.sglang.launch import start_server
from slimecli.ports import free_port
from slimecli.recipe import load_recipe
from slimecli.sync.push import push
from slimecli.sync.stage import stage_weights
from slimecli.weights.hf import HfFolder
from tests.engines.sglang import made
from tests.engines.sglang.test_server import GREEDY, PROMPTS, assert_greedy

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def parts(sglang_python, models, tmp_path_factory):
    """The server's two process groups, the first machine's first; each machine starts its own, at the same time."""
    recipe = load_recipe("", made.overrides(sglang_python, "sglang.tp_size=2", *made.PATIENT))
    folder, meeting, started = tmp_path_factory.mktemp("machines"), f"127.0.0.1:{free_port()}", {}

    def start(rank):
        share = (2, rank, meeting)
        started[rank] = start_server(recipe, models("qwen3"), log=folder / f"{rank}.log", share=share)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [started[rank] for rank in (0, 1)]
    for server in started.values():
        server.close()


@pytest.fixture
def spread(parts):
    """A client of the first machine."""
    client = HttpEngine(parts[0].url, timeout_s=180)
    yield client
    asyncio.run(client.close())


def answers(client):
    payload = {"input_ids": PROMPTS, "sampling_params": [GREEDY] * 3, "return_logprob": True}
    return asyncio.run(client.generate(payload))


def reference(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)


def test_halves_of_a_model_answer_as_the_whole_does(spread, parts, models):
    info = asyncio.run(spread.info())
    assert (info["tp_size"], info["nnodes"]) == (2, 2)
    assert_greedy(answers(spread), reference(models("qwen3")))
    for rank, server in enumerate(parts):
        assert server.alive() and any(f"TP{rank}]" in line for line in server.log_lines())
        assert not any(f"TP{1 - rank}]" in line for line in server.log_lines()), "each machine has its own half"


def test_only_the_first_machine_serves(parts):
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{parts[1].url}/generate", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert error.value.code == 404
    with urllib.request.urlopen(f"{parts[1].url}/health", timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("kind", ["disk", "shared_memory", "tensor", "distributed"])
def test_weights_reach_both_machines(spread, models, tmp_path, kind):
    """What both ranks hold is compared with what was sent: `push` raises otherwise."""
    for version, seed in ((3, 1), (4, 0)):
        like = models("qwen3", seed)
        folder = tmp_path / str(version)
        staged = stage_weights(HfFolder(like).iterate(), kind, version=version, folder=folder, like=like, one_host=True)
        (receipt,) = asyncio.run(push([spread], staged, 180))
        assert (receipt.version, receipt.fingerprint) == (version, staged.fingerprint)
        assert_greedy(answers(spread), reference(like))
