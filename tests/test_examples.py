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
