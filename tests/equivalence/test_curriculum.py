"""A run with a curriculum: its levels and rates come out of a kill -9 unchanged, and stand in the metrics."""

from tests.forked import slime, succeed
from tests.tiny_run import assert_same_run, metrics, sets

LEVELS = "data.curriculum.levels=[{min_digits=1, max_digits=1}, {min_digits=2, max_digits=2}]"
ARGUMENTS = [
    "--until",
    "loop",
    "--recipe",
    "quickstart",
    *sets("steps=4", "checkpoint.interval=2", LEVELS, "data.curriculum.rate=0.5", "data.count=100"),
]


def test_killed_and_resumed_equals_straight(tmp_path):
    whole = succeed("run", "--run", "whole", *ARGUMENTS, folder=tmp_path)
    assert slime("run", "--run", "r", *ARGUMENTS, folder=tmp_path, kill_at=whole.fsyncs * 3 // 4).code == -9
    runs = tmp_path / "runs"
    assert 0 < len(metrics(runs / "r")) < 4
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(runs / "whole", runs / "r", 4)
    told = [{k: v for k, v in r.items() if k.startswith("rollout/level/")} for r in metrics(runs / "whole")[1:]]
    assert all(abs(sum(v for k, v in r.items() if k.endswith("share")) - 1) < 1e-9 for r in told)
    assert {"rollout/level/0/success", "rollout/level/1/success"} <= told[-1].keys() and told[0] != told[-1]
