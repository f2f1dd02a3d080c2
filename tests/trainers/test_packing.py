"""Packings and attention layouts: what is computed, and where attention finds it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from slimecli.batch import from_groups
from slimecli.errors import SlimeError
from slimecli.trainers import _attention
from slimecli.trainers._attention import Layout, packed_attention
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
    assert packing.fresh.tolist() == [2, 1]
    assert packing.rows.tolist() == [0, 1, 1, 2]
    assert packing.targets.tolist() == [6, 7, 8, 9]
    assert packing.places.tolist() == [0, 1, 3, 4, 5]
    assert packing.predictions.tolist() == [0, 1, 0, 2, 3]


def test_a_distinct_prefix_is_computed_once():
    batch = of([1, 2, 3, 4], [9, 9], [1, 2, 5, 4], [1, 2, 3, 4], [1, 2, 3, 8])
    packing = pack(batch)
    prefixes = {(tuple(s[:i])) for s in ([1, 2, 3], [9], [1, 2, 5]) for i in range(1, len(s) + 1)}
    assert len(packing.token_ids) == len(prefixes) == 5
    assert len(packing.rows) == len({tuple(s[: i + 1]) for s in _lists(batch) for i in range(1, len(s))})
    assert len(pack(batch, share=False).token_ids) == 13


def _lists(batch):
    return [batch.tokens[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]


@pytest.mark.parametrize("share", [True, False])
def test_nodes_spell_every_sample(share):
    batch = from_groups(made.groups(6, 5), temperature=1.0)
    packing = pack(batch, share=share)
    spelled = sorted(packing.token_ids[packing.nodes[a:b]].tolist() for a, b in pairwise(packing.starts.tolist()))
    assert spelled == sorted(sample[:-1] for sample in _lists(batch))
    assert torch.equal(packing.token_ids[packing.rows[packing.predictions]], batch.tokens[packing.places])
    assert torch.equal(packing.targets[packing.predictions], batch.targets[packing.places])
    assert int(packing.fresh.sum()) == len(packing.token_ids)
    inside = packing.places - torch.repeat_interleave(batch.cu_seqlens[:-1], batch.lengths)[packing.places]
    assert torch.equal(packing.position_ids[packing.rows[packing.predictions]], inside)


def heads(count, nodes):
    return torch.randn(1, count, nodes, 8, dtype=torch.float64)


def by_hand(q, k, v, packing, window):
    """[1, U, heads, dim]: every node over the nodes before it in its sample."""
    result = torch.empty(q.shape[2], q.shape[1], 8, dtype=torch.float64)
    for a, b in pairwise(packing.starts.tolist()):
        path = packing.nodes[a:b]
        for i, node in enumerate(path):
            seen = path[max(0, i + 1 - window) if window else 0 : i + 1]
            for h in range(q.shape[1]):
                key_head = h * k.shape[1] // q.shape[1]
                shares = (k[0, key_head, seen] @ q[0, h, node] * 8**-0.5).softmax(0)
                result[node, h] = shares @ v[0, key_head, seen]
    return result[None]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("new_table", [0, 8192])
def test_attention_by_hand(share, window, new_table, monkeypatch):
    monkeypatch.setattr(_attention, "NEW_TABLE", new_table)
    torch.manual_seed(0)
    packing = pack(from_groups(made.groups(3, 4), temperature=1.0), share=share)
    count = len(packing.token_ids)
    q, k, v = heads(4, count), heads(2, count), heads(2, count)
    layout = Layout(packing)
    ours, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout, sliding_window=window)
    assert (ours - by_hand(q, k, v, packing, window)).abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 4])
def test_the_flash_path_hands_the_kernel_whole_samples(window, monkeypatch):
    """The GPU path with the kernel replaced by its definition: what is tested is the indexing around it."""

    def kernel(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        assert torch.equal(starts_q, starts_k) and starts_q.dtype == torch.int32
        assert longest_q == longest_k == int(starts_q.diff().max())
        assert window_size == ((-1 if window is None else window - 1), 0)
        answers = []
        for a, b in pairwise(starts_q.tolist()):
            i = torch.arange(b - a)
            allowed = i[:, None] >= i
            if window is not None:
                allowed &= i > i[:, None] - window
            one = (x[a:b].transpose(0, 1) for x in (q, k, v))
            y = torch.nn.functional.scaled_dot_product_attention(*one, allowed, scale=scale, enable_gqa=enable_gqa)
            answers.append(y.transpose(0, 1))
        return torch.cat(answers)

    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch.manual_seed(0)
    packing = pack(from_groups(made.groups(3, 4), temperature=1.0))
    count = len(packing.token_ids)
    q, k, v = heads(4, count), heads(2, count), heads(2, count)
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    ours = _attention._flash(*flat, Layout(packing), 8**-0.5, window)[None]
    assert (ours - by_hand(q, k, v, packing, window)).abs().max() < 1e-6


def test_attention_we_cannot_do_is_refused():
    packing = pack(of([1, 2, 3]))
    x = heads(2, 2)
    with pytest.raises(SlimeError, match="softcap"):
        packed_attention(torch.nn.Identity(), x, x, x, None, layout=Layout(packing), softcap=30.0)
