"""The example agent: by itself, and trained by its base URL."""

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli.agents import server as module
from slimecli.agents.server import AgentServer
from slimecli.cli import run
from slimecli.rundir import RunDir
from slimecli.types import Sample
from tests.agents.scripted import TOOLS_TEMPLATE, scripted
from tests.models import tiny_model, tiny_tokenizer
from tests.tiny_run import metrics

FOLDER = Path(__file__).parents[2] / "examples" / "calculator_agent"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 * 7 + 5"}}\n</tool_call>'


@pytest.fixture(scope="module")
def agent():
    return runpy.run_path(str(FOLDER / "agent.py"))


def test_the_calculator_counts_and_nothing_else(agent):
    def run_tool(expression):
        return agent["run"]({"arguments": json.dumps({"expression": expression})})

    assert run_tool("-(3 + 4) * 5") == "-35"
    for wrong in ("__import__('os')", "2 ** 999999", "1 / 0", "x", "(", 3):
        assert run_tool(wrong).startswith("error") or run_tool(wrong) == "3"
    assert agent["run"]({"arguments": "no json"}).startswith("error")


def test_a_tool_round_trip_as_a_program_and_as_one_clean_sample(tmp_path):
    own, text = scripted(tmp_path, "I count. " + CALL, "That is it.", "Answer: 89")
    server = AgentServer(text)

    async def work():
        async with server.session(Sample(index=3, label="89")) as session:
            line = [sys.executable, str(FOLDER / "agent.py"), session.base_url, session.api_key, "What is 12 * 7 + 5?"]
            said = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, check=True)
            return said.stdout, await session.samples()

    try:
        said, (sample,) = asyncio.run(work())
    finally:
        server.close()
    assert said == "89\n" and sample.metadata["turns"] == 3 and sample.metadata["tool_calls"] == 1
    shown = own.codec.decode([sample.tokens], False)[0]
    assert "<tool_response>89</tool_response>" in shown and shown.count("Answer: 89") == 1
    assert sample.rollout_id == 3 and sample.effective_response_length < sample.response_length


@pytest.mark.timeout(700)
def test_the_agent_is_trained_by_its_base_url(tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.setenv("SLIME_RUNS", str(tmp_path))
    model = tiny_model(tmp_path / "model", max_position_embeddings=1024)
    tokenizer = tiny_tokenizer(model)
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"{i} + {i} =", "label": str(2 * i)} for i in range(10, 20)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    small = {
        "data.train": str(tmp_path / "questions.jsonl"),
        "steps": 1,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_response_tokens": 10,
        "reward.path": "tests.tiny_run:even_share",
        "trainer.global_batch_size": 4,
        "engine.max_context": 900,
        "engine.slots": 4,
        "cluster.backend": "local",
        "model.dtype": "float32",
    }
    words = [word for k, v in small.items() for word in ("--set", f"{k}={json.dumps(v)}")]
    code = run(["run", "--recipe", str(FOLDER / "recipe.toml"), "--model", str(model), "--run", "agent", *words])
    assert code == 0
    groups = RunDir(tmp_path / "agent").read_samples(1)
    samples = [s for g in groups for s in g]
    assert len(groups) == 2 and len({s.rollout_id for s in samples}) == 4
    assert {s.metadata["turns"] for s in samples} == {4}, "it was asked again until its patience ended"
    assert all(0 < s.effective_response_length <= 40 < s.response_length for s in samples)
    assert not module._servers, "the adapter went with the run"
    (step,) = [m for m in metrics(tmp_path / "agent") if m["step"] == 1]
    assert step["train/logprob_gap"] < 1e-3 and step["train/grad_norm"] > 0
