"""Two steps of `slime run` write what the single commands write, byte for byte: process history implies nothing."""

from tests.forked import succeed
from tests.tiny_run import assert_same_run, assert_same_weights, sets


def test_run_equals_rollout_train_rollout_train(tmp_path):
    arguments = sets("steps=2")
    succeed("run", "--recipe", "quickstart", "--run", "whole", *arguments, folder=tmp_path)
    succeed("prepare-data", "--recipe", "quickstart", "--run", "parts", *arguments, folder=tmp_path)
    succeed("run", "--resume", "--run", "parts", "--until", "model", folder=tmp_path)
    succeed("train", "--run", "parts", "--stage", "sft", folder=tmp_path)
    for _ in range(2):
        succeed("rollout", "--run", "parts", folder=tmp_path)
        succeed("train", "--run", "parts", folder=tmp_path)
    succeed("export", "--run", "parts", folder=tmp_path)
    runs = tmp_path / "runs"
    assert_same_run(runs / "whole", runs / "parts", steps=2)
    assert_same_weights(runs / "whole" / "export", runs / "parts" / "export")
