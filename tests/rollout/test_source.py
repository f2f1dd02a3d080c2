import json

import pytest

from slimecli.errors import DataError, SlimeError
from slimecli.rollout.source import PromptSource
from slimecli.types import Sample


def rows(n):
    return [Sample(prompt=f"p{i}", tokens=[i]) for i in range(n)]


def walk(source, n):
    return [g[0].prompt for g in source.take(n)]


def test_every_epoch_shows_every_prompt_once_in_its_own_order():
    source = PromptSource(rows(20), 2, seed=1, shuffle=True)
    first, second = walk(source, 20), walk(source, 20)
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(20))
    assert first != second


def test_file_order_without_shuffle():
    assert walk(PromptSource(rows(3), 1, seed=1, shuffle=False), 7) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


def test_numbers_run_over_the_whole_run_and_copies_are_independent():
    groups = PromptSource(rows(4), 3, seed=0, shuffle=True).take(5)
    assert [g[0].group_index for g in groups] == [0, 1, 2, 3, 4]
    assert [s.index for g in groups for s in g] == list(range(15))
    groups[0][0].tokens.append(99)
    assert 99 not in groups[0][1].tokens


@pytest.mark.parametrize("taken", [0, 3, 7, 8, 9])
def test_state_continues_exactly_with_buffer_and_through_json(taken):
    straight = PromptSource(rows(8), 2, seed=5, shuffle=True)
    groups = straight.take(taken)
    straight.give_back(groups[-1:])
    state = json.loads(json.dumps(straight.state()))
    resumed = PromptSource(rows(8), 2, seed=5, shuffle=True)
    resumed.restore(state)
    expected = [[s.to_dict() for s in g] for g in straight.take(12)]
    assert [[s.to_dict() for s in g] for g in resumed.take(12)] == expected


def test_other_data_is_refused_at_resume():
    state = PromptSource(rows(8), 2, seed=5, shuffle=True).state()
    with pytest.raises(SlimeError, match="8"):
        PromptSource(rows(9), 2, seed=5, shuffle=True).restore(state)


def test_no_rows_is_an_error():
    with pytest.raises(DataError):
        PromptSource([], 1, seed=0, shuffle=True)


def test_preparing_ahead_changes_neither_what_is_taken_nor_the_state():
    plain = PromptSource(rows(8), 2, seed=5, shuffle=True)
    ahead = PromptSource(rows(8), 2, seed=5, shuffle=True)
    for count in (3, 4, 5, 8):
        ahead.prepare(4)
        assert ahead.state() == plain.state()
        assert [[s.to_dict() for s in g] for g in ahead.take(count)] == [
            [s.to_dict() for s in g] for g in plain.take(count)
        ]


def test_a_prepared_group_is_handed_out_once():
    source = PromptSource(rows(1), 2, seed=5, shuffle=False)
    source.prepare(1)
    first, second = source.take(2)
    first[0].tokens.append(99)
    assert 99 not in second[0].tokens
