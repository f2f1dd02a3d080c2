"""Each primitive of the weight map: exact inverses, every element in one place, rows where Megatron has them."""

import math
import random

import pytest
import torch

from slimecli.weights.maps.rule import (
    Rule,
    fused_qkv,
    padded_rows,
    part,
    rotated_rows,
    stacked_rows,
    swapped_columns,
    whole,
)


def random_shape(rng, dims):
    return tuple(rng.randint(1, 5) for _ in range(dims))


def a_whole(rng):
    return [whole("a", "K", random_shape(rng, rng.randint(1, 4)))]


def a_padded(rng):
    shape = random_shape(rng, rng.randint(1, 3))
    return [padded_rows("a", "K", shape, shape[0] + rng.randint(0, 4))]


def a_stack(rng):
    return stacked_rows([f"a{i}" for i in range(rng.randint(1, 4))], "K", random_shape(rng, rng.randint(1, 3)))


def some_experts(rng):
    experts, rows, cols = random_shape(rng, 3)
    full = (experts, 2 * rows, cols)
    return [
        part(f"{kind}{e}", "K", (rows, cols), full, (e, rows * half, 0))
        for e in range(experts)
        for half, kind in enumerate(("gate", "up"))
    ]


def a_qkv(rng):
    kv, group, dim = random_shape(rng, 3)
    tail = random_shape(rng, rng.randint(0, 2))
    names = ("q", "k", "v")
    return [fused_qkv(names, "K", kv_heads=kv, group=group, head_dim=dim, tail=tail, gated=rng.random() < 0.5)]


def a_rotation(rng):
    block = rng.randint(2, 6)
    shape = (block * rng.randint(1, 4), *random_shape(rng, rng.randint(0, 2)))
    return [rotated_rows("a", "K", shape, block=block, lead=rng.randint(1, block - 1))]


def a_swap(rng):
    return [swapped_columns("a", "K", (rng.randint(1, 6), 2 * rng.randint(1, 5)))]


PRIMITIVES = [a_whole, a_padded, a_stack, some_experts, a_qkv, a_rotation, a_swap]


def numbered(shapes):
    """Tensors whose elements are all different, from 1 on."""
    out, start = [], 1
    for shape in shapes:
        size = math.prod(shape)
        out.append(torch.arange(start, start + size).reshape(shape))
        start += size
    return out


@pytest.mark.parametrize("make", PRIMITIVES)
@pytest.mark.parametrize("seed", range(25))
def test_split_undoes_merge_and_chunks_tile_the_tensor(make, seed):
    rules = make(random.Random(seed))
    full = torch.full(rules[0].full, -1)
    sources = numbered([shape for rule in rules for shape in rule.hf.values()])
    for rule in rules:
        assert (rule.key, rule.full) == ("K", rules[0].full)
        tensors = [sources.pop(0) for _ in rule.hf]
        assert [tuple(t.shape) for t in tensors] == list(rule.hf.values())
        chunk = rule.merge(tensors)
        assert tuple(chunk.shape) == rule.chunk
        back = rule.split(chunk)
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
        place = tuple(slice(a, a + n) for a, n in zip(rule.offset, rule.chunk, strict=True))
        assert (full[place] == -1).all(), "two chunks overlap"
        full[place] = chunk
    assert (full >= 0).all(), "chunks leave a hole"
    values = full[full > 0]
    total = sum(math.prod(shape) for rule in rules for shape in rule.hf.values())
    assert values.unique().numel() == values.numel() == total, "an element is lost or doubled"


@pytest.mark.parametrize("make", PRIMITIVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_runs_say_where_every_row_comes_from(make, dtype):
    """What a streaming converter follows: the same bytes as merge, run by run."""
    for rule in make(random.Random(7)):
        width = rule.width or 1
        generator = torch.Generator().manual_seed(1)
        itemsize = torch.empty(0, dtype=dtype).element_size()
        raw = {
            n: torch.randint(0, 256, (math.prod(s) * itemsize,), dtype=torch.uint8, generator=generator)
            for n, s in rule.hf.items()
        }
        row = width * itemsize
        names = list(rule.hf)
        pieces = [
            torch.zeros(run.rows * row, dtype=torch.uint8)
            if run.source < 0
            else raw[names[run.source]][run.start * row : (run.start + run.rows) * row]
            for run in rule.runs
        ] or [raw[names[0]]]
        merged = rule.merge([raw[n].view(dtype).reshape(s) for n, s in rule.hf.items()])
        assert torch.equal(torch.cat(pieces), merged.reshape(-1).view(torch.uint8))


def rows(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(tensor.shape[0], -1)[:, 0].tolist()


def table(count: int, start: int = 0, cols: int = 3) -> torch.Tensor:
    """Row i is full of start + i."""
    return torch.arange(start, start + count)[:, None].expand(count, cols).contiguous()


def merged(rule: Rule, *tensors: torch.Tensor) -> torch.Tensor:
    return rule.merge(list(tensors))


def test_fused_qkv_rows():
    """2 KV heads, 2 query heads each, head of 2: per group its query rows, its key's, its value's."""
    rule = fused_qkv(("q", "k", "v"), "K", kv_heads=2, group=2, head_dim=2, tail=(3,))
    out = merged(rule, table(8), table(4, 100), table(4, 200))
    assert rows(out) == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert out.shape == (16, 3)


def test_gated_qkv_rows():
    """HF's q_proj has [query, gate] per head; Megatron has all queries of a group, then all its gates."""
    rule = fused_qkv(("q", "k", "v"), "K", kv_heads=2, group=2, head_dim=1, tail=(3,), gated=True)
    out = merged(rule, table(8), table(2, 100), table(2, 200))
    assert rows(out) == [0, 2, 1, 3, 100, 200, 4, 6, 5, 7, 101, 201]


def test_rotated_rows():
    assert rows(merged(rotated_rows("a", "K", (8, 3), block=4, lead=2), table(8))) == [2, 3, 0, 1, 6, 7, 4, 5]
    assert rows(merged(rotated_rows("a", "K", (6, 3), block=6, lead=2), table(6))) == [2, 3, 4, 5, 0, 1]
    assert merged(rotated_rows("a", "K", (4,), block=4, lead=2), torch.arange(4)).tolist() == [2, 3, 0, 1]


def test_swapped_columns():
    matrix = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert merged(swapped_columns("a", "K", (2, 4)), matrix).tolist() == [[3, 4, 1, 2], [7, 8, 5, 6]]


def test_padding_is_zeros_behind():
    assert rows(merged(padded_rows("a", "K", (2, 3), 4), table(2, 5))) == [5, 6, 0, 0]
    assert not padded_rows("a", "K", (2, 3), 2).runs


def test_parts_lie_at_their_offsets():
    gate, up = stacked_rows(["gate", "up"], "K", (4, 3))
    assert (gate.full, gate.offset, up.offset, up.chunk) == ((8, 3), (0, 0), (4, 0), (4, 3))
    third = part("e3.up", "K", (4, 3), (6, 8, 3), (3, 4, 0))
    assert (third.chunk, third.offset) == ((1, 4, 3), (3, 4, 0))
    assert merged(third, table(4)).shape == (1, 4, 3)
