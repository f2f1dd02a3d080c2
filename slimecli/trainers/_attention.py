"""Attention for packed micro-batches, registered with transformers under a name of ours.

The model's own code (projections, norms, rotary embedding) runs on the U nodes of a Packing. Only inside this function
do they take the shape of samples: tables of samples of like length, or, on a GPU, end to end for the variable-length
flash kernel. Attention never leaves a sample, because no two samples share a row. A node asks once, for the first
sample that has it; keys and values are read by every sample that has them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slimecli.errors import SlimeError
from slimecli.trainers._packing import Packing

NAME = "slime_packed"
NEW_TABLE = 8192
"""padding (query-key pairs) that costs as much as one more table does"""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Samples of like length side by side: n samples, up to Q own nodes and K positions each."""

    queries: Tensor
    """[n * Q] int64 nodes; short rows repeat their last one"""
    keys: Tensor
    """[n * K] int64 nodes; short rows repeat their last one"""
    bias: Tensor | None
    """[n, 1, Q, K] float32, 0 where a query may look and -inf elsewhere; None: plainly causal, Q = K"""
    shape: tuple[int, int, int]
    """(n, Q, K)"""


class Layout:
    """Where attention finds the nodes of a packing; made once per micro-batch, used by every layer."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.longest = int(packing.starts.diff().max())
        self._tables: dict[int | None, tuple[list[Table], Tensor]] = {}

    @functools.cached_property
    def owners(self) -> Tensor:
        """[U] for each node a position of some sample in F."""
        own = torch.arange(len(self.packing.nodes), device=self.packing.nodes.device)
        return torch.empty_like(self.packing.token_ids).scatter_(0, self.packing.nodes, own)

    def tables(self, window: int | None) -> tuple[list[Table], Tensor]:
        """Tables, and [U] where each node stands in their concatenated queries."""
        if window not in self._tables:
            self._tables[window] = self._make_tables(window)
        return self._tables[window]

    def _make_tables(self, window: int | None) -> tuple[list[Table], Tensor]:
        packing, device = self.packing, self.packing.nodes.device
        places = torch.empty_like(packing.token_ids)
        tables: list[Table] = []
        base = 0
        for members in self._alike():
            index = torch.tensor(members, device=device)
            start, fresh = packing.starts[index, None], packing.fresh[index, None]
            total = packing.starts[index + 1, None] - start
            queries, keys = int(fresh.max()), int(total.max())
            column, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
            asked = total - fresh + column
            asks = packing.nodes[start + asked.minimum(total - 1)]
            bias = None
            if window is not None or queries < keys or bool((fresh < total).any()):
                hidden = key > asked[:, :, None]
                if window is not None:
                    hidden |= key <= asked[:, :, None] - window
                bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None]
            places[asks[column < fresh]] = base + (column < fresh).flatten().nonzero().squeeze(1)
            base += asks.numel()
            reads = packing.nodes[start + key.minimum(total - 1)]
            shape = (len(members), queries, keys)
            tables.append(Table(queries=asks.flatten(), keys=reads.flatten(), bias=bias, shape=shape))
        return tables, places

    def _alike(self) -> list[list[int]]:
        """Samples with nodes of their own, by table."""
        fresh, total = self.packing.fresh.tolist(), self.packing.starts.diff().tolist()
        band = [int(math.log2(self.longest / t)) for t in total]
        order = sorted((i for i, f in enumerate(fresh) if f), key=lambda i: (band[i], -fresh[i], -total[i]))
        tables: list[list[int]] = []
        waste = 0
        for i in order:
            first = tables[-1][0] if tables else i
            waste += fresh[first] * total[first] - fresh[i] * total[i]
            if not tables or band[i] != band[first] or waste > NEW_TABLE:
                tables.append([])
                waste = 0
            tables[-1].append(i)
        return tables


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature.

    Args:
        query: [1, heads, U, dim].
        key: [1, key heads, U, dim]; value likewise.
        attention_mask: not used, the layout says it all.
        options: `layout`, `scaling`, `sliding_window` and what else a model passes.

    Returns [1, U, heads, dim].
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise SlimeError(
                f"{type(module).__name__} asks for attention with {name}, which the fsdp trainer lacks",
                "train a model of another family, or use trainer.backend = megatron",
            )
    layout: Layout = options["layout"]
    window = options.get("sliding_window")
    window = window if window is not None and window < layout.longest else None
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and has_flash()
    attend = _flash if flash else _tables
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, layout, scale, window)[None], None


def _tables(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """[U, heads, dim] table by table."""
    tables, places = layout.tables(window)
    heads, key_heads, width = query.shape[1], key.shape[1], value.shape[2]
    q, k, v = (x.reshape(len(x), -1) for x in (query, key, value))
    answers = []
    for table in tables:
        n, rows, columns = table.shape
        shaped_q = q.index_select(0, table.queries).view(n, rows, heads, -1).transpose(1, 2)
        shaped_k = k.index_select(0, table.keys).view(n, columns, key_heads, -1).transpose(1, 2)
        shaped_v = v.index_select(0, table.keys).view(n, columns, key_heads, -1).transpose(1, 2)
        mask = None if table.bias is None else table.bias.to(q.dtype)
        answer = scaled_dot_product_attention(
            shaped_q, shaped_k, shaped_v, mask, is_causal=mask is None, scale=scale, enable_gqa=heads != key_heads
        )
        answers.append(answer.transpose(1, 2).reshape(n * rows, heads * width))
    joined = answers[0] if len(answers) == 1 else torch.cat(answers)
    return joined.index_select(0, places).view(len(query), heads, width)


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """[U, heads, dim] by the variable-length flash kernel, every sample in full."""
    from torch.nn.attention.varlen import varlen_attn

    packing = layout.packing
    q, k, v = (x.index_select(0, packing.nodes) for x in (query, key, value))
    starts = packing.starts.int()
    bounds = (starts, starts, layout.longest, layout.longest)
    span = (-1 if window is None else window - 1, 0)
    y = varlen_attn(q, k, v, *bounds, scale=scale, window_size=span, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(y, Tensor)
    return y.index_select(0, layout.owners)


@functools.cache
def has_flash() -> bool:
    """True if this torch has the variable-length kernel in the form used here."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
