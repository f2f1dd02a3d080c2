"""Two steps of `slime run` write what the single commands write, byte for byte: process history implies nothing."""

import pytest

from tests.forked import succeed
from tests.tiny_run import assert_same_run, assert_same_weights, metrics, sets

PLAIN = ()
SEVERAL_STEPS_AND_A_REFERENCE = (
    "trainer.steps_per_rollout=2",
    "trainer.global_batch_size=8",
    "algo.kl_coef=0.1",
    "sft.steps=2",
    "data.count=60",
)


@pytest.mark.parametrize("extra", [PLAIN, SEVERAL_STEPS_AND_A_REFERENCE], ids=["plain", "several steps, reference"])
def test_run_equals_rollout_train_rollout_train(extra, tmp_path):
    arguments = sets("steps=2", *extra)
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
    if extra:
        first, second = metrics(runs / "whole")
        assert first["train/first_step_kl"] == 0.0, "policy, old policy and reference begin as one model"
        assert second["train/kl"] > first["train/kl"] > 0, "the reference stays where it began"
