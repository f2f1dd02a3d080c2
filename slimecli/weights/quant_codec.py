"""The arithmetic of quantised weights: stored bytes <-> numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

E4M3 = torch.float8_e4m3fn
LOGICAL = torch.bfloat16
"""dtype that quantised weights are read in"""
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
"""so that a block of zeros can be divided by its scale"""


def decode_e4m3(stored: torch.Tensor) -> torch.Tensor:
    """[n] uint8 -> [n] bfloat16, exactly; two at a time by table, three times as fast as torch's conversion."""
    if stored.numel() % 2:
        return stored.view(E4M3).to(LOGICAL)
    pairs = np.take(_e4m3_table(), stored.numpy().view(np.uint16))
    return torch.from_numpy(pairs.view(np.int32)).view(LOGICAL)


def decode_int4(stored: torch.Tensor) -> torch.Tensor:
    """[n] uint8 -> [2n] bfloat16; the lower half of a byte comes first."""
    fours = np.take(_int4_table(), stored.numpy().view(np.uint16))
    return torch.from_numpy(fours.view(np.int64)).view(LOGICAL)


@lru_cache(maxsize=1)
def _e4m3_table() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """[65536]: two e4m3 bytes -> two bfloat16."""
    one = torch.arange(256, dtype=torch.uint8).view(E4M3).to(LOGICAL).view(torch.int16).numpy().view(np.uint16)
    index = np.arange(1 << 16)
    table: np.ndarray[Any, np.dtype[np.uint32]] = one[index & 255] | one[index >> 8].astype(np.uint32) << 16
    return table


@lru_cache(maxsize=1)
def _int4_table() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[65536]: four 4-bit numbers, each with 8 added -> four bfloat16."""
    one = (torch.arange(16) - 8).to(LOGICAL).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    index = np.arange(1 << 16)
    table = np.zeros(1 << 16, np.uint64)
    for i in range(4):
        table |= one[index >> 4 * i & 15] << np.uint64(16 * i)
    return table


def multiply_blocks(values: torch.Tensor, scales: torch.Tensor, per: int, out: torch.Tensor) -> None:
    """out = values * scales in float32; `per` columns share a scale, the last ones may be fewer."""
    rows, whole = values.shape[0], values.shape[1] // per
    edge = whole * per
    if whole:
        target = out[:, :edge].view(rows, whole, per)
        torch.mul(values[:, :edge].view(rows, whole, per), scales[:, :whole, None], out=target)
    if edge < values.shape[1]:
        torch.mul(values[:, edge:], scales[:, whole:], out=out[:, edge:])


def encode_e4m3(
    weight: torch.Tensor, block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per block: the largest magnitude of a block becomes 448, the largest e4m3 number.

    Args:
        weight: [.., rows, cols], any floating dtype.
        block: rows and columns that share a scale; edge blocks are smaller.
        power_of_two: scales are rounded up to powers of two (UE8M0), as DeepGEMM wants them on Blackwell.

    Returns [.., rows, cols] e4m3 and [.., ceil(rows/high), ceil(cols/wide)] float32 scales. The scale of a block with
    NaN or infinity is not finite, and its values mean nothing.
    """
    rows, cols = weight.shape[-2:]
    stack = weight.reshape(-1, rows, cols)
    values = torch.empty(stack.shape, dtype=E4M3)
    scales = torch.empty(stack.shape[0], -(-rows // block[0]), -(-cols // block[1]))
    for i, band, start in ((i, b, b * block[0]) for i in range(len(stack)) for b in range(scales.shape[1])):
        part = stack[i, start : start + block[0]].float()
        scale = (block_maxima(part, block[1]) / E4M3_MAX).clamp_(min=SMALLEST_SCALE)
        scales[i, band] = _round_up_to_power(scale) if power_of_two else scale
        by_column = scales[i, band].repeat_interleave(block[1])[:cols]
        # torch's cast makes NaN of what is beyond the largest number, which rounding may reach by a hair
        values[i, start : start + block[0]] = torch.div(part, by_column).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    lead = weight.shape[:-2]
    return values.reshape(weight.shape), scales.reshape(*lead, *scales.shape[1:])


def block_maxima(band: torch.Tensor, wide: int) -> torch.Tensor:
    """[ceil(cols/wide)]: largest magnitude of each run of columns of a [rows, cols] band; NaN where there is one."""
    columns = band.abs().amax(dim=0)
    return torch.nn.functional.pad(columns, (0, -len(columns) % wide)).view(-1, wide).amax(dim=1)


def _round_up_to_power(scale: torch.Tensor) -> torch.Tensor:
    """Exact: by exponent and mantissa, not by logarithm."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(
        torch.isfinite(scale), torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()), scale
    )
