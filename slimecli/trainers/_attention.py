"""Attention for packed micro-batches, registered with transformers under a name of ours.

The model's own code (projections, norms, rotary embedding) runs on the U nodes of a Packing. Only inside this function
do they take the shape of samples: padded [N, heads, longest, dim] for SDPA, or end to end for the variable-length flash
kernel on a GPU. Attention never leaves a sample, because no two samples share a row.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slimecli.errors import SlimeError
from slimecli.trainers._packing import Packing

NAME = "slime_packed"


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature.

    Args:
        query: [1, heads, U, dim].
        key: [1, key heads, U, dim]; value likewise.
        attention_mask: not used, the packing says it all.
        options: `packing`, `scaling`, `sliding_window` and what else a model passes.

    Returns [1, U, heads, dim].
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise SlimeError(
                f"{type(module).__name__} asks for attention with {name}, which the fsdp trainer lacks",
                "train a model of another family, or use trainer.backend = megatron",
            )
    packing: Packing = options["packing"]
    window = options.get("sliding_window")
    window = window if window is not None and window < packing.longest else None
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _has_flash()
    attend = _flash if flash else _padded
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packing, options.get("scaling"), window)[None], None


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """[U, heads, dim] by SDPA on padded samples."""
    index, out = packing.padded
    size = (len(packing.starts) - 1, packing.longest)
    q, k, v = (
        x.reshape(len(x), -1).index_select(0, index).view(*size, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    mask = None
    if window is not None:
        mask = torch.ones(size[1], size[1], dtype=torch.bool, device=q.device).tril().triu(1 - window)
    grouped = q.shape[1] != k.shape[1]
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return (
        y.transpose(1, 2)
        .reshape(-1, query.shape[1] * value.shape[2])
        .index_select(0, out)
        .view(len(query), query.shape[1], value.shape[2])
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """[U, heads, dim] by the variable-length flash kernel."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.index_select(0, packing.nodes) for x in (query, key, value))
    bounds = (packing.starts, packing.starts, packing.longest, packing.longest)
    span = (-1 if window is None else window - 1, 0)
    y = varlen_attn(q, k, v, *bounds, scale=scale, window_size=span, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(y, Tensor)
    return y.index_select(0, packing.owners)


@functools.cache
def _has_flash() -> bool:
    """True if this torch has the variable-length kernel in the form used here."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
