"""A rule: which HF tensors make up which Megatron chunk, and how to go either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


def _same(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _same_back(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """HF tensors <-> one chunk of one Megatron tensor. Several rules may fill parts of the same Megatron tensor."""

    hf: dict[str, Shape]
    """HF name -> shape, in the order `merge` takes them"""
    key: str
    """Megatron name"""
    full: Shape
    """shape of the whole Megatron tensor"""
    offset: Shape
    """where this chunk begins in it"""
    chunk: Shape
    """shape of this chunk"""
    merge: Callable[[list[torch.Tensor]], torch.Tensor] = _same
    """HF tensors -> chunk"""
    split: Callable[[torch.Tensor], list[torch.Tensor]] = _same_back
    """chunk -> HF tensors; exact inverse of merge"""
    keep_dtype: bool = False
    """a cast of the model leaves these as they are: float32 by design in a bfloat16 model"""


def whole(hf_name: str, key: str, shape: Shape) -> Rule:
    """One HF tensor that is one Megatron tensor."""
    return Rule(hf={hf_name: shape}, key=key, full=shape, offset=(0,) * len(shape), chunk=shape)


def padded_rows(hf_name: str, key: str, shape: Shape, rows: int) -> Rule:
    """One HF tensor whose Megatron form has zero rows appended up to `rows`; they are cut on the way back."""
    full = (rows, *shape[1:])

    def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[0]
        return torch.cat([tensor, tensor.new_zeros(rows - shape[0], *shape[1:])]) if rows > shape[0] else tensor

    return Rule(
        hf={hf_name: shape},
        key=key,
        full=full,
        offset=(0,) * len(shape),
        chunk=full,
        merge=merge,
        split=lambda t: [t[: shape[0]]],
    )


def stacked_rows(hf_names: list[str], key: str, shape: Shape) -> list[Rule]:
    """HF tensors of equal shape that lie one below the other in a Megatron tensor, each a chunk of its own."""
    full = (shape[0] * len(hf_names), *shape[1:])
    rest = (0,) * (len(shape) - 1)
    return [
        Rule(hf={name: shape}, key=key, full=full, offset=(i * shape[0], *rest), chunk=shape)
        for i, name in enumerate(hf_names)
    ]


def fused_qkv(names: tuple[str, str, str], key: str, *, kv_heads: int, group: int, head_dim: int, tail: Shape) -> Rule:
    """q, k, v projections <-> one matrix whose rows are, per KV group: its q heads, its k head, its v head.

    Args:
        tail: remaining dimensions: (hidden,) for weights, () for biases.
    """
    q_rows, kv_rows = kv_heads * group * head_dim, kv_heads * head_dim
    shapes = [(q_rows, *tail), (kv_rows, *tail), (kv_rows, *tail)]
    full = (q_rows + 2 * kv_rows, *tail)

    def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
        blocks = [t.reshape(kv_heads, -1, *tail) for t in tensors]
        return torch.cat(blocks, dim=1).reshape(full)

    def split(tensor: torch.Tensor) -> list[torch.Tensor]:
        blocks = torch.tensor_split(
            tensor.reshape(kv_heads, -1, *tail), (group * head_dim, (group + 1) * head_dim), dim=1
        )
        return [b.reshape(s) for b, s in zip(blocks, shapes, strict=True)]

    return Rule(
        hf=dict(zip(names, shapes, strict=True)),
        key=key,
        full=full,
        offset=(0,) * len(full),
        chunk=full,
        merge=merge,
        split=split,
    )
