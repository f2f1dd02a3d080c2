"""Which answers of a prompt are written, and in which form."""

from __future__ import annotations

from collections import Counter

import pytest

from slimecli.data_tools.selection import parse_selection
from slimecli.types import Sample, SampleStatus


def group():
    rewards = (0.5, 1.0, 0.0, 1.0, None)
    made = [Sample(index=i, reward=r, response=str(i), status=SampleStatus.COMPLETED) for i, r in enumerate(rewards)]
    made[4].status = SampleStatus.FAILED
    return made


@pytest.mark.parametrize(
    ("text", "kept", "left"),
    [
        ("samples", [0, 1, 2, 3, 4], {}),
        ("samples:best", [1], {"failed": 1, "not best": 3}),  # of equal ones the first
        ("samples:best=3", [0, 1, 3], {"failed": 1, "not best": 1}),
        ("samples:passing", [1, 3], {"failed": 1, "not passing": 2}),
        ("samples:min=0.5", [0, 1, 3], {"failed": 1, "not min": 1}),
    ],
)
def test_rules_keep_order_and_count_what_they_leave(text, kept, left):
    counts: Counter[str] = Counter()
    picked = parse_selection(text).pick(group(), None, counts)
    assert [s.index for s in picked] == kept and +counts == Counter(left)
