"""Causal attention on torch's own kernels: packed samples, grouped queries, latent attention, context parallelism.

It takes the place of Transformer Engine's attention where that is not installed. On a GPU packed samples go through
torch's variable-length flash attention, if this torch has it; elsewhere each sample is attended to by itself. With
context parallelism keys and values are gathered over the ranks, and a rank's queries, two chunks of every sample, see
what precedes them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimecli.trainers._attention import has_flash


class CoreAttention(torch.nn.Module):
    """[L, B, heads, dim] (or packed, [L, heads, dim]) queries, keys and values -> [L, B, heads * value dim]."""

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale
        self.context_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Attention output; `attention_mask` is not looked at: the mask is always causal."""
        if packed_seq_params is None:
            return self._whole(query, key, value)
        bounds: Tensor = packed_seq_params.cu_seqlens_q
        if self.config.context_parallel_size > 1:
            out = self._split(query, key, value, bounds.tolist())
        elif _flashes(query, value):
            out = self._flash(query, key, value, packed_seq_params)
        else:
            out = torch.cat([self._attend(query[a:b], key[a:b], value[a:b]) for a, b in _pairs(bounds.tolist())])
        return out.flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """It has no weights."""
        return {}

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Unpacked samples of one length."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """[L, heads, dim] of one sample; causal unless a mask is given."""
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)
        return out

    def _split(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        """Context parallelism: this rank has the chunks r and 2c-1-r of every sample's 2c."""
        import torch.distributed as dist
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        ranks, rank = self.config.context_parallel_size, dist.get_rank(self.context_group)
        order = global_order(bounds, ranks).to(key.device)
        # the backward pass of the gather adds up what all ranks' queries say of a key
        keys, values = (
            gather_from_sequence_parallel_region(t.contiguous(), group=self.context_group)[order] for t in (key, value)
        )
        out = []
        for a, b in _pairs(bounds):
            here = slice(a // ranks, b // ranks)
            positions = torch.arange(b - a, device=key.device).chunk(2 * ranks)
            mine = torch.cat([positions[rank], positions[2 * ranks - 1 - rank]])
            mask = mine[:, None] >= torch.arange(b - a, device=key.device)[None]
            out.append(self._attend(query[here], keys[a:b], values[a:b], mask))
        return torch.cat(out)


def _flashes(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] and has_flash()


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def global_order(bounds: list[int], ranks: int) -> Tensor:
    """[total] index into the rank-by-rank gathered tokens that puts every sample's tokens in order."""
    local = bounds[-1] // ranks
    order = torch.empty(bounds[-1], dtype=torch.int64)
    for a, b in _pairs(bounds):
        chunk = (b - a) // (2 * ranks)
        begin = a // ranks
        for part in range(2 * ranks):
            owner = part if part < ranks else 2 * ranks - 1 - part
            first = owner * local + begin + (0 if part < ranks else chunk)
            order[a + part * chunk : a + (part + 1) * chunk] = torch.arange(first, first + chunk)
    return order
