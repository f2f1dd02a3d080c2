"""Answers that are interrupted and continued."""

import asyncio
import json
from collections import Counter

import pytest

from slimecli.errors import SlimeError, UsageError
from slimecli.rollout.collect import RolloutCollector
from slimecli.rollout.source import PromptSource
from slimecli.types import Sample, SampleStatus
from tests.rollout.fakes import PacedEngine
from tests.rollout.pieces import collector, numbers, pieces

PARTIAL = ("rollout.partial=true", "rollout.over_sampling_batch_size=8", "rollout.max_response_tokens=60")


def slow_twos(ids):
    """Every third prompt has a long answer."""
    return 50 if ids[0] % 3 == 2 else 3


def collect_in_turn(made, engine, steps):
    async def work():
        batches = []
        for step in range(1, steps + 1):
            engine.version = step - 1
            batches.append(await made.collect(step))
        return batches

    return asyncio.run(work())


def test_what_runs_when_the_batch_is_full_is_interrupted_and_continued_with_new_weights():
    engine = PacedEngine(slow_twos)
    made, source = collector(engine, *PARTIAL)
    batches = collect_in_turn(made, engine, 6)
    assert numbers(batches[0].groups) == [0, 1, 3, 4], "the long answers of 2 and 5 were not waited for"
    assert all(len(b.groups) == 4 for b in batches)
    taken = [n for b in batches for n in numbers(b.groups)]
    assert len(set(taken)) == len(taken), "no group is trained on twice"
    continued = [s for b in batches for g in b.groups for s in g if len(s.weight_versions) > 1]
    assert continued, "nothing was continued: this tests nothing"
    for sample in continued:
        assert sample.status is SampleStatus.COMPLETED and sample.response_length == 50
        assert sample.loss_mask is None and len(sample.rollout_log_probs) == 50
        for version, start, end in sample.version_spans:
            said = sample.tokens[1 + start : 1 + end]
            assert set(said) <= {100 + int(version), 2}, "each token counts as that of the weights that said it"
        assert sample.version_spans[-1][2] == 50
    waiting = {g[0]["group_index"] for g in source.state()["buffer"]}
    assert not waiting & set(taken)
    assert batches[-1].metrics["rollout/staleness_max"] >= 1 or any(
        b.metrics["rollout/partial_fraction"] > 0 for b in batches
    )


def test_a_continued_request_holds_all_tokens_and_what_is_left_of_the_budget():
    engine = PacedEngine(lambda ids: 50 if ids[0] % 3 == 2 else 3)
    made, _ = collector(engine, *PARTIAL[:2], "rollout.max_response_tokens=20")
    batches = collect_in_turn(made, engine, 5)
    again = [
        (ids, params)
        for call in engine.calls
        for ids, params in zip(call["input_ids"], call["sampling_params"], strict=True)
        if len(ids) > 1
    ]
    assert again
    assert all(params["max_new_tokens"] == 20 - (len(ids) - 1) for ids, params in again)
    ended = [s for b in batches for g in b.groups for s in g if s.status is SampleStatus.TRUNCATED]
    assert ended and all(s.response_length == 20 for s in ended)


def test_what_is_finished_of_an_interrupted_group_stays_and_is_scored_with_the_rest():
    asked = Counter()

    def second_is_long(ids):
        asked[ids[0]] += len(ids) == 1
        return 50 if len(ids) > 1 or (ids[0] % 3 == 2 and asked[ids[0]] % 2 == 0) else 3

    engine = PacedEngine(second_is_long)
    made, source = collector(engine, *PARTIAL)
    first = collect_in_turn(made, engine, 1)[0]
    halves = [g for g in source.state()["buffer"] if {s["status"] for s in g} == {"completed", "aborted"}]
    assert halves and all("reward" not in s for g in halves for s in g) and len(first.groups) == 4
    begun = engine.calls[:]
    later = asyncio.run(made.collect(2)).groups + asyncio.run(made.collect(3)).groups
    ended = [g for g in later if len({s.response_length for s in g}) == 2]
    assert ended and all(s.status is SampleStatus.COMPLETED and s.reward is not None for g in ended for s in g)
    assert all(len(call["input_ids"]) == 1 for call in engine.calls[len(begun) :] if len(call["input_ids"][0]) > 1)


def test_interrupted_answers_survive_a_checkpoint():
    engine = PacedEngine(slow_twos)
    made, source = collector(engine, *PARTIAL)
    collect_in_turn(made, engine, 1)
    state = json.loads(json.dumps(made.cursor()["source"]))
    statuses = {s["status"] for g in state["buffer"] for s in g}
    assert "aborted" in statuses and any(s.get("rollout_log_probs") for g in state["buffer"] for s in g)
    recipe, resumed, answering = pieces(engine, *PARTIAL)
    resumed.restore(state)
    assert resumed.state() == source.state()
    batch = collect_in_turn(RolloutCollector(recipe, resumed, answering), engine, 3)[-1]
    assert batch.groups


def test_tokens_of_earlier_weights_can_be_left_out_of_training():
    engine = PacedEngine(slow_twos)
    made, source = collector(engine, *PARTIAL, "rollout.mask_off_policy_tokens=true")
    batches = collect_in_turn(made, engine, 6)
    continued = [s for b in batches for g in b.groups for s in g if len(s.weight_versions) > 1]
    assert continued
    for sample in continued:
        begun = sample.version_spans[-1][1]
        assert sample.loss_mask == [0] * begun + [1] * (sample.response_length - begun)
    whole = [g for g in source.state()["buffer"] if all(s["status"] in ("completed", "truncated") for s in g)]
    assert not whole, "a finished answer would be masked from end to end; its prompt waits instead"


def test_a_finished_group_too_many_keeps_its_answers():
    engine = PacedEngine(lambda ids: 3)
    made, _source = collector(engine, *PARTIAL)
    first = collect_in_turn(made, engine, 1)[0]
    assert first.metrics["rollout/surplus"] == 4.0 and numbers(first.groups) == [0, 1, 2, 3]
    calls = len(engine.calls)
    engine.version = 1
    second = asyncio.run(made.collect(2))
    assert numbers(second.groups) == [4, 5, 6, 7] and second.metrics["rollout/staleness_mean"] == 1.0
    asked = {ids[0] for call in engine.calls[calls:] for ids in call["input_ids"]}
    assert asked.isdisjoint({4, 5, 6, 7}), "they are not asked for again"


@pytest.mark.parametrize("length", [lambda ids: 3, slow_twos])
def test_every_group_is_decided_once_however_long_it_waits(length):
    """A curriculum learns from each group once, and a failure is counted in one step; the filter sees all of them."""
    seen, told = [], []
    engine = PacedEngine(length)
    made, source = collector(engine, *PARTIAL, keep=lambda args, group: not seen.append(group[0].group_index))
    source.feedback = lambda groups: told.extend(g[0].group_index for g in groups)
    batches = collect_in_turn(made, engine, 5)
    assert sum(b.metrics["rollout/surplus"] for b in batches) > 0, "no group was one too many: this tests nothing"
    assert seen == told and len(set(told)) == len(told)
    assert set(told) >= {n for b in batches for n in numbers(b.groups)}


def test_an_answer_that_waited_too_long_begins_anew():
    engine = PacedEngine(slow_twos)
    made, _source = collector(engine, *PARTIAL, "rollout.partial_staleness=1")
    asyncio.run(made.collect(1))
    engine.version = 4
    batch = asyncio.run(made.collect(5))
    assert batch.metrics["rollout/stale"] >= 4 and batch.metrics["rollout/staleness_max"] == 0.0


def test_a_function_that_cannot_continue_is_refused():
    async def once(args, sample, params):
        return sample

    recipe, _source, answering = pieces(PacedEngine(slow_twos), *PARTIAL)
    from dataclasses import replace

    from slimecli.rollout.answering import Answering

    with pytest.raises(UsageError, match="supports_partial"):
        Answering(recipe, replace(answering.generator, custom=once), [2], None)
    once.supports_partial = True
    Answering(recipe, replace(answering.generator, custom=once), [2], None)


def test_a_filter_that_starves_the_step_is_an_error_and_leaves_nothing_running():
    engine = PacedEngine(slow_twos)
    made, _ = collector(engine, *PARTIAL, "rollout.max_filtered_rounds=2", keep=lambda args, samples: False)

    async def work():
        with pytest.raises(SlimeError, match="after 2 rounds only 0 of 4"):
            await made.collect(1)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(work()) == [] and engine.running == 0


@pytest.mark.parametrize("partial", [False, True])
def test_a_filter_may_let_dropped_groups_fill_a_step(partial):
    class Insufficient:
        keep, reason, keep_when_insufficient = False, "flat", True

    def keep(args, samples):
        return samples[0].group_index == 2 or Insufficient

    words = PARTIAL[:2] if partial else ()
    engine = PacedEngine(lambda ids: 3)
    made, _source = collector(engine, *words, keep=keep)
    batch = asyncio.run(made.collect(1))
    assert 2 in numbers(batch.groups) and len(batch.groups) == 4
    assert len({ids[0] for call in engine.calls for ids in call["input_ids"]}) == (8 if partial else 4), "one round"
    dropped = batch.metrics.get("rollout/dropped/flat", 0)
    assert dropped == (4 if partial else 0), "what is trained on was not dropped"


def test_requests_in_flight_are_bounded():
    engine = PacedEngine(lambda ids: 4)
    made, _ = collector(engine, "rollout.batch_size=16", "rollout.concurrency=6")
    asyncio.run(made.collect(1))
    assert engine.most == 3, "three groups of two answers"


def test_prompts_after_the_cut_are_the_same_however_answers_finish():
    """Without partial rollout nothing depends on which answers happened to be ready."""

    def left(length):
        made, source = collector(
            PacedEngine(length),
            "rollout.over_sampling_batch_size=8",
            keep=lambda args, samples: samples[0].group_index % 2 == 0,
        )
        batch = asyncio.run(made.collect(1))
        return numbers(batch.groups), batch.metrics["rollout/surplus"], source.state()

    assert left(lambda ids: 3) == left(slow_twos) == left(lambda ids: 20 - ids[0] % 20)


def test_the_source_numbers_prompts_once():
    source = PromptSource([Sample(prompt="a", tokens=[1])], 2, seed=0, shuffle=False)
    groups = source.take(3)
    source.give_back(groups[1:])
    assert numbers(source.take(3)) == [1, 2, 3]
