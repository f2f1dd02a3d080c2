"""Rollout that overlaps with training: as reproducible as without, through kill -9 as well; and nothing is lost."""

import json

import pytest

from slimecli.rundir import RunDir
from tests.forked import slime, succeed
from tests.tiny_run import assert_same_run, metrics, sets

STEPS = 6
SMALL = ("data.count=80", "data.holdout=4", "sft.steps=2", f"steps={STEPS}", "algo.correction.level=token")
TIMETABLES = {
    "one ahead": ("rollout.max_staleness=1", "checkpoint.interval=2"),
    "two ahead, every second version": ("rollout.max_staleness=3", "sync.interval=2", "checkpoint.interval=2"),
}


def arguments(*words):
    """Without an export: what it writes is not part of what a kill point is a fraction of."""
    return ["--until", "loop", "--recipe", "quickstart", *sets(*SMALL, *words)]


@pytest.fixture(scope="module", params=TIMETABLES)
def straight(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    outcome = succeed("run", "--run", "r", *arguments(*TIMETABLES[request.param]), folder=folder)
    return TIMETABLES[request.param], folder / "runs" / "r", outcome.fsyncs


@pytest.mark.parametrize("part", [0.55, 0.75, 0.95])
def test_killed_and_resumed_equals_straight(straight, tmp_path, part):
    words, expected, writes = straight
    assert slime("run", "--run", "r", *arguments(*words), folder=tmp_path, kill_at=int(writes * part)).code == -9
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_same_run(expected, tmp_path / "runs" / "r", STEPS)


def test_every_answer_says_which_weights_it_comes_from(straight):
    words, expected, _ = straight
    ages = [r["rollout/staleness_max"] for r in metrics(expected) if "rollout/staleness_max" in r]
    assert ages == ([0, 1, 1, 1, 1, 1] if "sync.interval=2" not in words else [0, 1, 2, 3, 2, 3])
    for step in range(1, STEPS + 1):
        told = {v for g in RunDir(expected).read_samples(step) for s in g for v in s.weight_versions}
        assert told == {str(step - 1 - int(ages[step - 1]))}


def test_less_staleness_after_a_resume_trains_on_no_older_answer(tmp_path):
    words = arguments("rollout.max_staleness=2", "checkpoint.interval=2")
    whole = succeed("run", "--run", "whole", *words, folder=tmp_path)
    assert slime("run", "--run", "r", *words, folder=tmp_path, kill_at=whole.fsyncs * 3 // 4).code == -9
    run = RunDir(tmp_path / "runs" / "r")
    done = run.last_checkpoint()
    assert 0 < done < STEPS
    succeed("run", "--resume", "--run", "r", "--set", "rollout.max_staleness=0", folder=tmp_path)
    later = [r for r in metrics(run.root) if r["step"] > done]
    assert [r["rollout/staleness_max"] for r in later] == [0] * (STEPS - done)
    assert_each_prompt_once(run)


@pytest.mark.parametrize(
    "words",
    [
        ("rollout.max_staleness=2", "rollout.fully_async=true"),
        ("rollout.partial=true", "rollout.over_sampling_batch_size=12", "rollout.max_response_tokens=24"),
        (
            "rollout.partial=true",
            "rollout.over_sampling_batch_size=12",
            "rollout.max_response_tokens=24",
            "rollout.max_staleness=1",
        ),
    ],
)
def test_where_timing_decides_no_prompt_is_lost_or_doubled_by_a_kill(tmp_path, words):
    told = arguments(*words, "checkpoint.interval=2", "checkpoint.keep=3")
    whole = succeed("run", "--run", "whole", *told, folder=tmp_path)
    assert slime("run", "--run", "r", *told, folder=tmp_path, kill_at=whole.fsyncs * 3 // 4).code == -9
    run = RunDir(tmp_path / "runs" / "r")
    assert 0 < len(metrics(run.root)) < STEPS
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_each_prompt_once(run)
    oldest = max(r["rollout/staleness_max"] for r in metrics(run.root) if "rollout/staleness_max" in r)
    assert oldest <= run.recipe().rollout.oldest


def assert_each_prompt_once(run):
    taken = [g[0].group_index for step in range(1, STEPS + 1) for g in run.read_samples(step)]
    assert len(set(taken)) == len(taken) == 4 * STEPS
    state = json.loads((run.checkpoint_dir(STEPS) / "data_state.json").read_text())
    waiting = [g[0]["group_index"] for g in [*state["source"]["buffer"], *state.get("waiting", [])]]
    assert sorted([*taken, *waiting]) == list(range(state["source"]["next_group"]))


def test_single_commands_go_on_where_batches_were_made_ahead(tmp_path):
    words = arguments("rollout.max_staleness=2", "checkpoint.interval=2")
    whole = succeed("run", "--run", "whole", *words, folder=tmp_path)
    assert slime("run", "--run", "r", *words, folder=tmp_path, kill_at=whole.fsyncs * 7 // 10).code == -9
    run = RunDir(tmp_path / "runs" / "r")
    done = run.last_checkpoint()
    assert 0 < done < STEPS - 1
    there = slime("rollout", "--run", "r", folder=tmp_path)
    assert there.code == 2 and f"the samples of step {done + 1} are there" in there.err
    succeed("train", "--run", "r", folder=tmp_path)
    name = f"rollouts/step_{done + 1:06d}.jsonl.zst"
    assert (run.root / name).read_bytes() == (tmp_path / "runs" / "whole" / name).read_bytes()
    succeed("rollout", "--run", "r", folder=tmp_path)
    assert {v for g in run.read_samples(done + 2) for s in g for v in s.weight_versions} == {str(done + 1)}
    succeed("train", "--run", "r", folder=tmp_path)
    succeed("run", "--resume", "--run", "r", folder=tmp_path)
    assert_each_prompt_once(run)
