"""What becomes of the turns of an execution. Tokens: P = 1 2, then u* from the environment and a* from the model."""

import random
from dataclasses import replace

import pytest

from slimecli.errors import DataError, SlimeError
from slimecli.rollout.segments import Join, Trajectory, common_prefix
from slimecli.types import Sample, SampleStatus

P = [1, 2]
U1, U2, V2 = [10, 11], [20, 21, 22], [25]
A1, A2, B1 = [100, 101, 102], [200, 201], [300]


def turn(trajectory: Trajectory, prompt, output, finish="stop", version="0", **kwargs):
    log_probs = [-t / 1024 for t in output]
    return trajectory.append_turn(prompt, output, log_probs, [version], finish, **kwargs)


def base(**changes) -> Sample:
    sample = Sample(group_index=3, index=7, prompt="p", tokens=[*P], label="42", metadata={"a": 1}, session_id="s")
    return replace(sample, **changes)


def test_one_turn_is_one_sample():
    t = Trajectory()
    assert turn(t, P, A1).kind is Join.FIRST
    (sample,) = t.samples(base(), decode=lambda ids: " ".join(map(str, ids)))
    assert sample.tokens == P + A1
    assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])
    assert sample.rollout_log_probs == [-100 / 1024, -101 / 1024, -102 / 1024]
    assert (sample.prompt, sample.response) == ("p", "100 101 102")
    assert (sample.rollout_id, sample.index, sample.group_index, sample.session_id) == (7, 7, 3, "s")
    assert (sample.label, sample.status, sample.reward) == ("42", SampleStatus.COMPLETED, None)
    assert sample.metadata == {"a": 1, "turns": 1}


def test_clean_turns_are_one_sample_with_the_environment_masked():
    t = Trajectory()
    turn(t, P, A1, version="4")
    joined = turn(t, P + A1 + U2, A2, "length", version="5")
    assert (joined.kind, joined.segment, joined.shared) == (Join.CLEAN, 0, 5)
    (sample,) = t.samples(base())
    assert sample.tokens == P + A1 + U2 + A2
    assert sample.prompt_length == 2
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1]
    assert sample.rollout_log_probs == [*(-t / 1024 for t in A1), 0.0, 0.0, 0.0, *(-t / 1024 for t in A2)]
    assert sample.weight_versions == ["4", "5"]
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.metadata["turns"] == 2
    assert (t.turns, t.breaks) == (2, 0)


def test_a_continued_answer_has_nothing_between():
    t = Trajectory()
    turn(t, P, A1, "abort", version="1")
    assert turn(t, P + A1, A2, version="2").kind is Join.CLEAN
    (sample,) = t.samples(base())
    assert sample.tokens == P + A1 + A2
    assert sample.loss_mask == [1] * 5
    assert (sample.weight_versions, sample.status) == (["1", "2"], SampleStatus.COMPLETED)


def test_who_spoke_which_token():
    t = Trajectory(max_tokens=9)
    t.append_turn(P, A1, [-1.0] * 3, [("7", 0, 1), ("8", 1, 3)], "stop")
    t.append_turn(P + A1 + U1, [*A2, 9], [-1.0] * 3, ["8", "9"], "stop")  # one of its three tokens is cut off
    (sample,) = t.samples(base())
    assert sample.version_spans == [["7", 0, 1], ["8", 1, 3], ["8", 5, 7]]
    assert sample.weight_versions == ["7", "8", "9"]


def test_an_answer_told_differently_begins_a_segment():
    t = Trajectory()
    turn(t, P, A1)
    joined = turn(t, P + A1[2:] + U2, A2)  # the first two tokens of A1, its thinking, are gone
    assert (joined.kind, joined.segment, joined.shared) == (Join.REALIGNED, 1, 2)
    first, second = t.samples(base())
    assert (first.tokens, first.loss_mask) == (P + A1, [1, 1, 1])
    assert (second.tokens, second.prompt_length) == (P + A1[2:] + U2 + A2, 6)
    assert (second.loss_mask, second.rollout_log_probs) == ([1, 1], [-200 / 1024, -201 / 1024])
    assert first.rollout_id == second.rollout_id == 7
    assert [s.metadata["segment"] for s in (first, second)] == [0, 1]
    assert second.metadata["segments"] == 2
    assert t.breaks == 1


def test_an_answer_told_differently_can_be_an_error():
    t = Trajectory(on_break="error")
    turn(t, P, A1)
    with pytest.raises(SlimeError, match=r"turn 2 does not continue .* differs from token 3 on"):
        turn(t, P + A1[:1] + [999], A2)
    assert turn(t, P + A1 + U2, A2).kind is Join.CLEAN  # the refused turn left nothing behind
    assert t.turns == 2


def test_other_words_of_the_environment_are_a_fork_and_shared_turns_are_trained_once():
    t = Trajectory(on_break="error")
    turn(t, P, A1)
    turn(t, P + A1 + U2, A2)
    assert turn(t, P + A1 + V2, B1).kind is Join.FORKED
    assert turn(t, P + A1 + V2 + B1 + U1, A1).kind is Join.CLEAN  # the branch goes on
    first, second = t.samples(base())
    assert first.tokens == P + A1 + U2 + A2
    assert second.tokens == P + A1 + V2 + B1 + U1 + A1
    assert second.prompt_length == len(P + A1 + V2)
    assert second.loss_mask == [1, 0, 0, 1, 1, 1]
    assert sum(first.mask) + sum(second.mask) == len(A1 + A2 + B1 + A1)


def test_asked_again_is_a_fork():
    t = Trajectory(on_break="error")
    turn(t, P, A1)
    assert turn(t, P, B1).kind is Join.FORKED
    assert turn(t, P + B1 + U1, A2).segment == 1
    assert turn(t, P + A1 + U1, A2).segment == 0
    assert [s.tokens for s in t.samples(base())] == [P + A1 + U1 + A2, P + B1 + U1 + A2]


def test_another_conversation_is_a_fork():
    t = Trajectory(on_break="error")
    turn(t, P, A1)
    joined = turn(t, [9, 9], A2)
    assert (joined.kind, joined.shared) == (Join.FORKED, 0)
    assert len(t.samples(base())) == 2


def test_in_one_conversation_every_branch_is_a_break():
    t = Trajectory(on_break="error", linear=True)
    turn(t, P, A1)
    turn(t, P + A1 + U2, A2)
    with pytest.raises(SlimeError, match="differs from token 5 on"):
        turn(t, P + A1 + V2, B1)


def test_the_longest_segment_that_fits_is_continued():
    t = Trajectory()
    turn(t, P, A1)
    turn(t, [*P, 100], [500])
    assert turn(t, P + A1 + U1, A2).segment == 0
    assert turn(t, [*P, 100, 500, *U1], A2).segment == 1


def test_answers_beyond_the_limit_are_cut():
    t = Trajectory(max_tokens=4)
    turn(t, P, A1)
    (sample,) = t.samples(base())
    assert (sample.tokens, sample.status) == (P + A1[:2], SampleStatus.TRUNCATED)
    assert len(sample.rollout_log_probs) == sample.response_length == 2
    turn(t, P + A1 + U1, A2)  # goes on after what was cut: the request breaks off inside what is held, or adds nothing
    assert all(len(s.tokens) <= 4 for s in t.samples(base()))


def test_environment_that_leaves_no_room_is_not_kept():
    t = Trajectory(max_tokens=7)
    turn(t, P, A1)
    assert turn(t, P + A1 + U2, A2).kind is Join.CLEAN
    (sample,) = t.samples(base())
    assert (sample.tokens, sample.status) == (P + A1, SampleStatus.TRUNCATED)


def test_a_request_beyond_the_limit_leaves_a_sample_without_training():
    t = Trajectory(max_tokens=2)
    turn(t, [1, 2, 3], A1)
    (sample,) = t.samples(base())
    assert (sample.tokens, sample.response_length, sample.status) == ([1, 2], 0, SampleStatus.TRUNCATED)
    sample.reward = 0.0
    sample.check()


def test_turns_that_are_not_trained_on():
    t = Trajectory()
    turn(t, P, A1, trained=False)
    turn(t, P + A1 + U1, A2)
    (sample,) = t.samples(base())
    assert sample.loss_mask == [0, 0, 0, 0, 0, 1, 1]
    assert sample.rollout_log_probs[:5] == [0.0] * 5
    t = Trajectory()
    turn(t, P, A1, trained=False)
    turn(t, [9], A2)
    (sample,) = t.samples(base())  # a segment with nothing to train on is no sample
    assert sample.tokens == [9, *A2]
    assert "segments" not in sample.metadata


def test_samples_share_nothing():
    t = Trajectory()
    turn(t, P, A1)
    turn(t, P, A2)
    first, second = t.samples(base())
    first.tokens.append(5)
    first.metadata["x"] = 1
    assert second.tokens == P + A2
    assert "x" not in second.metadata
    assert t.samples(base())[0].tokens == P + A1


@pytest.mark.parametrize(
    ("prompt", "output", "log_probs", "finish", "text"),
    [
        ([], [1], [-0.1], "stop", "no prompt token"),
        ([1], [1, 2], [-0.1], "stop", "2 tokens and 1 log-probs"),
        ([1], [1], [-0.1], "eos", "'eos'"),
    ],
)
def test_faulty_turns_are_refused(prompt, output, log_probs, finish, text):
    with pytest.raises(DataError, match=text):
        Trajectory().append_turn(prompt, output, log_probs, ["0"], finish)


def test_common_prefix():
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert common_prefix([8], [9]) == 0


def test_random_trees_train_every_token_once_after_exactly_what_the_engine_saw():
    """Whatever the requests: each turn is trained on in one sample, after its own request."""
    for seed in range(60):
        rng = random.Random(seed)
        t, said, told = Trajectory(), [], [[1]]
        for number in range(12):
            prompt = list(rng.choice(told))
            if rng.random() < 0.3:
                prompt = prompt[: rng.randint(1, len(prompt))]
            prompt += [rng.randint(2, 4) for _ in range(rng.randint(0, 2))]
            output = [1000 + number * 10 + i for i in range(rng.randint(1, 3))]
            turn(t, prompt, output)
            said.append((prompt, output))
            told.append(prompt + output)
        found = []
        for segment in t.segments:
            trained = [segment.prompt_length + i for i, m in enumerate(segment.mask) if m]
            assert trained == [p for a, b in segment.spoken for p in range(a, b)]
            found += [(segment.tokens[:a], segment.tokens[a:b]) for a, b in segment.spoken]
        assert sorted(found) == sorted(said)
