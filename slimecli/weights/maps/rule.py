"""A rule: which HF tensors make up which Megatron chunk.

Every rule rearranges whole rows: seen as matrices of `width` columns, a chunk is a list of row ranges (`Run`) of its HF
tensors, one below the other. So both directions follow from one table, neither changes a bit of any dtype, and a tensor
of any size can be carried over range by range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

Shape = tuple[int, ...]


class Run(NamedTuple):
    """Consecutive rows of one HF tensor."""

    source: int
    """which of Rule.hf, in order; ZEROS: rows of zeros that no HF tensor has"""
    start: int
    """first row in that tensor"""
    rows: int


ZEROS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """HF tensors <-> one chunk of one Megatron tensor. Several rules may fill parts of the same Megatron tensor."""

    hf: dict[str, Shape]
    """HF name -> shape, in the order that Run.source counts"""
    key: str
    """Megatron name"""
    full: Shape
    """shape of the whole Megatron tensor"""
    offset: Shape
    """where this chunk begins in it"""
    chunk: Shape
    """shape of this chunk"""
    width: int = 0
    """elements per row of `runs`"""
    runs: tuple[Run, ...] = ()
    """what the chunk is made of, from its first row to its last; empty: the one HF tensor, element by element"""
    keep_dtype: bool = False
    """a cast of the model leaves these as they are: float32 by design in a bfloat16 model"""

    def merge(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """HF tensors -> chunk."""
        if not self.runs:
            return tensors[0].reshape(self.chunk)
        tables = [t.reshape(-1, self.width) for t in tensors]
        parts = [
            tables[0].new_zeros(run.rows, self.width)
            if run.source == ZEROS
            else tables[run.source][run.start : run.start + run.rows]
            for run in self.runs
        ]
        return torch.cat(parts).reshape(self.chunk)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """chunk -> HF tensors; the exact inverse of merge."""
        if not self.runs:
            return [tensor.reshape(shape) for shape in self.hf.values()]
        table = tensor.reshape(-1, self.width)
        out = [tensor.new_empty(math.prod(shape) // self.width, self.width) for shape in self.hf.values()]
        row = 0
        for run in self.runs:
            if run.source != ZEROS:
                out[run.source][run.start : run.start + run.rows] = table[row : row + run.rows]
            row += run.rows
        return [t.reshape(shape) for t, shape in zip(out, self.hf.values(), strict=True)]


def whole(hf_name: str, key: str, shape: Shape, *, keep_dtype: bool = False) -> Rule:
    """One HF tensor that is one Megatron tensor."""
    offset = (0,) * len(shape)
    return Rule(hf={hf_name: shape}, key=key, full=shape, offset=offset, chunk=shape, keep_dtype=keep_dtype)


def part(hf_name: str, key: str, shape: Shape, full: Shape, offset: Shape) -> Rule:
    """One HF tensor that is a block of a Megatron tensor, which may have more (leading) dimensions."""
    chunk = (1,) * (len(full) - len(shape)) + shape
    return Rule(hf={hf_name: shape}, key=key, full=full, offset=offset, chunk=chunk)


def stacked_rows(hf_names: list[str], key: str, shape: Shape) -> list[Rule]:
    """HF tensors of equal shape that lie one below the other in a Megatron tensor, each a chunk of its own."""
    full = (shape[0] * len(hf_names), *shape[1:])
    rest = (0,) * (len(shape) - 1)
    return [part(name, key, shape, full, (i * shape[0], *rest)) for i, name in enumerate(hf_names)]


def padded_rows(hf_name: str, key: str, shape: Shape, rows: int) -> Rule:
    """One HF tensor whose Megatron form has zero rows appended up to `rows`; they are cut on the way back."""
    if rows <= shape[0]:
        return whole(hf_name, key, shape)
    runs = (Run(0, 0, shape[0]), Run(ZEROS, 0, rows - shape[0]))
    return _rearranged({hf_name: shape}, key, (rows, *shape[1:]), math.prod(shape[1:]), runs)


def fused_qkv(
    names: tuple[str, str, str], key: str, *, kv_heads: int, group: int, head_dim: int, tail: Shape, gated: bool = False
) -> Rule:
    """q, k, v projections <-> one matrix whose rows are, per KV group: q heads, (their gates,) k head, v head.

    Args:
        group: query heads per KV head.
        tail: remaining dimensions: (hidden,) for weights, () for biases.
        gated: q has two blocks per head, first the query's, then the output gate's.
    """
    kinds = 2 if gated else 1
    runs: list[Run] = []
    for kv in range(kv_heads):
        first = kv * group * kinds
        if gated:
            runs += [Run(0, (first + head * 2 + kind) * head_dim, head_dim) for kind in (0, 1) for head in range(group)]
        else:
            runs.append(Run(0, first * head_dim, group * head_dim))
        runs += [Run(1, kv * head_dim, head_dim), Run(2, kv * head_dim, head_dim)]
    q_rows, kv_rows = kv_heads * group * kinds * head_dim, kv_heads * head_dim
    shapes = [(q_rows, *tail), (kv_rows, *tail), (kv_rows, *tail)]
    full = (q_rows + 2 * kv_rows, *tail)
    return _rearranged(dict(zip(names, shapes, strict=True)), key, full, math.prod(tail), tuple(runs))


def rotated_rows(hf_name: str, key: str, shape: Shape, *, block: int, lead: int) -> Rule:
    """In every block of `block` rows the first `lead` ones lie behind the others in Megatron's form."""
    runs: list[Run] = []
    for start in range(0, shape[0], block):
        runs += [Run(0, start + lead, block - lead), Run(0, start, lead)]
    return _rearranged({hf_name: shape}, key, shape, math.prod(shape[1:]), tuple(runs))


def swapped_columns(hf_name: str, key: str, shape: tuple[int, int]) -> Rule:
    """The left and the right half of a matrix change places."""
    runs = tuple(Run(0, row * 2 + half, 1) for row in range(shape[0]) for half in (1, 0))
    return _rearranged({hf_name: shape}, key, shape, shape[1] // 2, runs)


def _rearranged(hf: dict[str, Shape], key: str, full: Shape, width: int, runs: tuple[Run, ...]) -> Rule:
    return Rule(hf=hf, key=key, full=full, offset=(0,) * len(full), chunk=full, width=width, runs=runs)
