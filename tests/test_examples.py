"""What stands in examples/ runs."""

import json

from slimecli.rundir import RunDir
from tests.forked import succeed
from tests.tiny_run import metrics, sets

EXAMPLES = "rollout.max_response_tokens=8", "engine.max_context=160"


def test_the_multi_agent_example_trains(tmp_path):
    from tests.architecture.sources import ROOT

    hook = f"rollout.custom_generate='{ROOT}/examples/multi_agent.py:generate'"
    extra = sets(*EXAMPLES, hook, "steps=2", "sft.steps=2", "gates.action=warn")
    succeed("run", "--recipe", "quickstart", "--run", "r", *extra, folder=tmp_path)
    run = tmp_path / "runs" / "r"
    assert [r["step"] for r in metrics(run) if r["step"]] == [1, 2]
    groups = RunDir(run).read_samples(1)
    assert len(groups) == 4
    for group in groups:
        assert len(group) == 12  # four executions of three agents
        for execution in range(4):
            team = group[3 * execution : 3 * execution + 3]
            assert len({s.rollout_id for s in team}) == 1
            assert [s.metadata["segment"] for s in team] == [0, 1, 2]
            assert len({json.dumps(s.reward) for s in team}) == 1
            assert all(s.response_length > 0 for s in team)
    first = groups[0][:3]
    assert first[0].prompt_length < first[1].prompt_length < first[2].prompt_length


def test_the_calculator_recipe_calls_its_tool(tmp_path):
    """Eight products, learnt by heart with their calls, then two steps of real conversations with the tool."""
    changes = (
        "data.count=8", "data.holdout=2", "data.demonstration_args={direct=0.0}", "sft.steps=60", "sft.batch_size=8",
        "sft.warmup_steps=2", "steps=2", "rollout.batch_size=2", "rollout.n_samples_per_prompt=4",
        "trainer.global_batch_size=8", "trainer.warmup_steps=1", "engine.slots=8", "eval.interval=0",
        "cluster.backend=local", "gates.action=warn", "checkpoint.interval=1",
    )  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    succeed("run", "--recipe", "calculator", "--run", "r", *words, folder=tmp_path)
    run = tmp_path / "runs" / "r"
    done = [r for r in metrics(run) if r["step"]]
    assert [r["step"] for r in done] == [1, 2]
    assert all(r["rollout/stats/tool_calls"] > 0.5 and r["rollout/stats/turns"] > 1.5 for r in done)
    assert all(r["train/logprob_gap_max"] < 1e-4 for r in done)
    samples = [s for g in RunDir(run).read_samples(2) for s in g]
    called = [s for s in samples if s.metadata["stats"]["tool_calls"] and not s.metadata["stats"]["tool_errors"]]
    assert called
    for sample in called:
        assert sample.response.startswith("<tool_call>")
        assert 0 in sample.mask
        assert sample.mask[-1] == 1
        assert all(p == 0.0 for p, m in zip(sample.rollout_log_probs, sample.mask, strict=True) if not m)
    perf = [json.loads(line) for line in (run / "perf.jsonl").read_text().splitlines()]
    for record in (r for r in perf if r["step"]):
        longest = record["seconds/non_generation_max"]
        assert 0 < record["seconds/non_generation_mean"] <= longest < record["seconds/generate"]
