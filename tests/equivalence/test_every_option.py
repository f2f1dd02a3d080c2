"""The switches of GRPO that the quickstart leaves alone, all on at once, through the command line."""

import pytest

from tests.equivalence.test_layouts import assert_close_run
from tests.forked import slime, succeed
from tests.tiny_run import assert_same_run, metrics, sets

STEPS = 3
OPTIONS = (
    "algo.kl_coef=0.1",
    "algo.kl_type='k2'",
    "algo.entropy_coef=0.01",
    "algo.std_normalization=false",
    "algo.eps_clip_high=0.28",
    "algo.aggregation='token'",
    "trainer.steps_per_rollout=2",
    "trainer.global_batch_size=8",
    "rollout.min_p=0.01",
    "rollout.stop=['=']",
    "model.dtype='bfloat16'",
    "checkpoint.interval=2",
)
SMOOTH = ("trainer.adam_eps=1e-3", "sft.steps=2", "steps=2", "model.dtype='float32'")


def arguments(*extra):
    return ("--recipe", "quickstart", *sets(f"steps={STEPS}", *OPTIONS, *extra))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    outcome = succeed("run", "--run", "r", "--until", "loop", *arguments(), folder=folder)
    return folder / "runs" / "r", outcome.fsyncs


def test_policy_leaves_the_reference_and_the_first_step_starts_at_it(straight):
    first, *rest = metrics(straight[0])
    assert first["train/first_step_kl"] == 0.0, "reference, old policy and policy are the same weights"
    assert all(r["train/kl"] > first["train/kl"] > 0 for r in rest)
    assert all(r["train/ppo_kl"] != 0 and r["train/entropy"] > 0 for r in (first, *rest))


def test_reference_and_master_weights_survive_a_resume(straight, tmp_path):
    """The reference is the SFT's result, not what the checkpoint holds; float32 masters are not their bf16 copies."""
    expected, writes = straight
    words = ("run", "--run", "r", "--until", "loop", *arguments())
    assert slime(*words, folder=tmp_path, kill_at=writes - 12).code == -9
    saved = sorted(p.name for p in (tmp_path / "runs" / "r" / "checkpoints").glob("step_*"))
    assert saved[-1] == "step_000002", "killed before there was a checkpoint, or after the last one"
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(expected, tmp_path / "runs" / "r", STEPS)


def test_sharing_prefixes_and_recomputing_change_nothing(tmp_path):
    for name, extra in (("a", ()), ("b", ("trainer.shared_prefix=false", "trainer.activation_checkpointing=true"))):
        succeed("run", "--run", name, *arguments(*SMOOTH, *extra), folder=tmp_path)
    assert_close_run(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
