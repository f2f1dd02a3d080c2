"""Packings: what is computed, and where attention finds it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from slimecli.batch import from_groups
from slimecli.trainers._packing import pack
from slimecli.types import Sample
from tests.trainers import made


def of(*samples):
    rows = [Sample(tokens=list(s), response_length=len(s) - 1) for s in samples]
    return from_groups([rows], temperature=1.0)


def test_example_of_the_docstring():
    packing = pack(of([5, 6, 7], [5, 6, 8, 9]))
    assert packing.token_ids.tolist() == [5, 6, 8]
    assert packing.position_ids.tolist() == [0, 1, 2]
    assert packing.nodes.tolist() == [0, 1, 0, 1, 2]
    assert packing.starts.tolist() == [0, 2, 5]
    assert packing.owners.tolist() == [0, 1, 4]
    assert packing.rows.tolist() == [0, 1, 0, 1, 2]
    assert packing.targets.tolist() == [6, 7, 6, 8, 9]
    assert packing.longest == 3


def test_a_distinct_prefix_is_computed_once():
    batch = of([1, 2, 3, 4], [9, 9], [1, 2, 5, 4], [1, 2, 3, 4], [1, 2, 3, 8])
    packing = pack(batch)
    prefixes = {(tuple(s[:i])) for s in ([1, 2, 3], [9], [1, 2, 5]) for i in range(1, len(s) + 1)}
    assert len(packing.token_ids) == len(prefixes) == 5
    assert len(pack(batch, share=False).token_ids) == 13


@pytest.mark.parametrize("share", [True, False])
def test_nodes_spell_every_sample(share):
    batch = from_groups(made.groups(6, 5), temperature=1.0)
    packing = pack(batch, share=share)
    spelled = sorted(packing.token_ids[packing.nodes[a:b]].tolist() for a, b in pairwise(packing.starts.tolist()))
    bounds = batch.cu_seqlens.tolist()
    assert spelled == sorted(batch.tokens[a : max(b - 1, a + 1)].tolist() for a, b in pairwise(bounds))
    assert packing.nodes[packing.owners].tolist() == list(range(len(packing.token_ids)))
    assert torch.equal(packing.token_ids[packing.rows], batch.tokens[packing.places])
    inside = packing.places - torch.repeat_interleave(batch.cu_seqlens[:-1], batch.lengths)[packing.places]
    assert torch.equal(packing.position_ids[packing.rows], inside)
    index, places = packing.padded
    assert torch.equal(index[places], torch.arange(len(packing.token_ids)))
