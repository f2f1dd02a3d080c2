"""Contradictions in how rollout and training overlap, in interrupted answers and in data sources."""

import pytest

from slimecli.plan_rollout import check_rollout, continues, rollout_warnings
from slimecli.recipe import load_recipe

OVER = ("rollout.partial=true", "rollout.over_sampling_batch_size=48")


def problems(*overrides):
    return list(check_rollout(load_recipe("", overrides), None))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("sync.interval=3", "rollout.max_staleness=1", "checkpoint.interval=3"), "set that to 2 or more"),
        (("sync.interval=2", "rollout.max_staleness=1", "checkpoint.interval=5"), "`checkpoint.interval` = 5 is not a"),
        (
            ("sync.interval=2", "rollout.max_staleness=1", "checkpoint.interval=4", "eval.interval=3"),
            "`eval.interval` = 3 is not a multiple",
        ),
        (("rollout.fully_async=true",), "needs `rollout.max_staleness` = 1"),
        (("rollout.fully_async=true", "rollout.max_staleness=1", *OVER), "no effect with `rollout.fully_async`"),
        (("rollout.partial=true",), "set `rollout.over_sampling_batch_size` above it"),
        ((*OVER, "rollout.custom_generate=json:dumps"), "supports_partial"),
        (("rollout.mask_off_policy_tokens=true",), "no effect without `rollout.partial`"),
        (("rollout.partial_staleness=3",), "`rollout.partial_staleness` has no effect"),
        (("rollout.stale=mask",), "nothing grows too old"),
        (("data.workers=2", "data.stream=true"), "`data.workers` has no effect with `data.stream`"),
        (("rollout.stream=true", "rollout.custom_generate=tool_loop"), "`rollout.stream` has no effect with"),
        (("rollout.data_source=no.such:Thing",), "`rollout.data_source` = 'no.such:Thing': there is no module"),
        (("rollout.buffer_filter=json:nope", *OVER), "defines no 'nope'"),
        (("rollout.buffer_filter=json:dumps",), "no group ever waits"),
        (("rollout.data_source=json:dumps", "data.stream=true"), "`data.stream` has no effect"),
        (("data.mix={a=0.0, b=1.0}",), "gives 'a' the weight 0"),
        (("eval.interval=1", "data.holdout=1", "eval.max_response_tokens=2048"), "`engine.max_context` = 3072"),
        (("eval.interval=1", "eval.sets={a={path='a', max_prompt_tokens=1025}}"), "`eval.sets.a`: prompt and answer"),
    ],
)
def test_each_contradiction_is_told(overrides, expected):
    (problem,) = problems(*overrides)
    assert expected in problem


def test_all_are_told_at_once():
    assert len(problems("rollout.fully_async=true", "rollout.partial=true", "data.mix={a=-1.0}")) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        OVER,
        ("rollout.max_staleness=1",),
        ("rollout.max_staleness=2", "sync.interval=2", "checkpoint.interval=4"),
        ("rollout.max_staleness=1", "rollout.fully_async=true", "rollout.stale=mask"),
        ("steps=0", "sync.interval=9"),
        ("eval.max_response_tokens=2048", "data.holdout=1"),
        ("eval.max_response_tokens=2048", "data.holdout=1", "eval.interval=1", "engine.max_context=3072"),
        ("eval.max_response_tokens=2048", "data.holdout=1", "eval.interval=1", "engine.backend=sglang"),
        ("eval.max_response_tokens=512", "data.holdout=1", "eval.interval=1"),
    ],
)
def test_what_goes_together(overrides):
    assert problems(*overrides) == []


def test_a_function_says_that_it_continues(tmp_path):
    file = tmp_path / "g.py"
    file.write_text("async def go(args, sample, p):\n    return sample\n\ngo.supports_partial = True\n")
    assert continues(f"{file}:go") and not continues(f"{file}:stop")
    assert continues("tool_loop") and not continues("loop")
    assert problems(*OVER, f"rollout.custom_generate={file}:go") == []


def test_stale_answers_without_a_correction_deserve_a_look():
    def told(*overrides):
        return " ".join(rollout_warnings(load_recipe("", overrides)))

    assert "up to 2 versions old" in told("rollout.max_staleness=2")
    assert "versions old" not in told("rollout.max_staleness=2", "algo.correction.level=token")
    assert "versions old" not in told("rollout.max_staleness=2", "algo.old_log_probs=engine")
    assert "up to 8 versions old" in told(*OVER) and "depends on timing" in told(*OVER)
    assert "versions old" not in told(*OVER, "rollout.mask_off_policy_tokens=true")
    assert told() == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("rollout.max_staleness=1",), ""),
        (("rollout.max_staleness=2",), "rollout.max_staleness = 2 gains nothing over 1 at sync.interval = 1"),
        (("rollout.max_staleness=3", "sync.interval=2", "checkpoint.interval=2"), ""),
        (
            ("rollout.max_staleness=4", "sync.interval=2", "checkpoint.interval=2"),
            "nothing over 3 at sync.interval = 2",
        ),
        (("rollout.max_staleness=2", "rollout.fully_async=true"), ""),
        (("rollout.max_staleness=2", "steps=0", "sft.steps=1"), ""),
    ],
)
def test_batches_that_are_ahead_for_nothing(overrides, told):
    found = [w for w in rollout_warnings(load_recipe("", overrides)) if "gains nothing" in w]
    assert bool(found) == bool(told) and all(told in w for w in found)
