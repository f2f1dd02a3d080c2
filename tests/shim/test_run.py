"""A run whose generate function was written for slime; the engine is in the same process and has no address."""

from pathlib import Path

from slimecli.rundir import RunDir
from tests.forked import succeed
from tests.tiny_run import metrics, sets

PLUGIN = Path(__file__).parent / "plugins" / "retool_like.py"


def test_a_plugin_trains(tmp_path):
    hook = f"rollout.custom_generate='{PLUGIN}:generate'"
    extra = sets(
        hook, "rollout.max_response_tokens=60", "engine.max_context=300", "steps=2", "sft.steps=2", "gates.action=warn"
    )
    succeed("plan", "--recipe", "quickstart", *extra, folder=tmp_path)
    succeed("run", "--recipe", "quickstart", "--run", "r", *extra, folder=tmp_path)
    run = tmp_path / "runs" / "r"
    done = [r for r in metrics(run) if r["step"]]
    assert [r["step"] for r in done] == [1, 2]
    assert all(r["train/logprob_gap_max"] < 1e-4 and r["train/grad_norm"] > 0 for r in done)
    samples = [s for g in RunDir(run).read_samples(2) for s in g]
    assert len(samples) == 16
    assert all(0 in s.mask and 1 in s.mask for s in samples)
    assert len({s.rollout_id for s in samples}) == 16
