"""The functions of docs/hooks.md and docs/tools.md work as they stand there."""

import re
from pathlib import Path

from slimecli.rundir import RunDir
from slimecli.tools.base import as_tool
from tests.forked import succeed
from tests.tiny_run import metrics, sets

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page):
    return {
        match[1]: match[0]
        for match in re.finditer(
            r"(?<=```python\n)# ([a-z]+\.py).*?(?=```)", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
        )
    }


def test_the_reward_and_the_generate_function_train(tmp_path):
    for name, text in blocks("hooks.md").items():
        (tmp_path / name).write_text(text)
    hooks = ("rollout.custom_generate=twice.py:generate", "reward.path=length.py:score", "reward.key=short")
    extra = sets(*hooks, "rollout.max_response_tokens=24", "steps=1", "sft.steps=2", "gates.action=warn")
    succeed("run", "--recipe", "quickstart", "--run", "r", *extra, folder=tmp_path)
    run = tmp_path / "runs" / "r"
    (step,) = [r for r in metrics(run) if r["step"]]
    assert step["rollout/failed"] == 0 and step["train/logprob_gap"] < 1e-4
    for sample in (s for group in RunDir(run).read_samples(1) for s in group):
        assert sample.metadata["turns"] == 2 and set(sample.reward) == {"score", "short"}
        assert 0 in sample.mask and sample.mask[0] == sample.mask[-1] == 1
        assert sample.response_length <= 24


def test_the_tool_has_the_schema_that_its_docstring_says():
    namespace: dict[str, object] = {}
    exec(blocks("tools.md")["mytools.py"], namespace)
    schema = as_tool(namespace["look_up"], "mytools.py:look_up").schema()["function"]
    assert schema["name"] == "look_up" and schema["description"] == "Price of so many pieces of fruit, in euros."
    assert schema["parameters"]["properties"]["count"]["description"] == "how many"
    assert schema["parameters"]["required"] == ["item"]
