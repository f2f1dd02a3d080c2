"""The hash that SGLang's weight checker computes of a tensor on a GPU, in plain torch on any device.

The tensor's bytes are read as 32-bit words. Word i goes through two 32-bit mixers with keys made of i, the results are
summed over tiles of 8192 words, each tile's pair of sums is mixed with the size and put together to 64 bits, and the
tiles are summed and mixed once more.
"""

from __future__ import annotations

import torch

TILE = 8192
"""words per tile"""
TILES_AT_ONCE = {"cpu": 16, "cuda": 4096}
"""bounds the temporary memory"""
_MASK = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
_KEYS = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""(factor of the word's number, left rotation of it) of each mixer"""


def device_hash(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's bytes in element order."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 4:
        octets = torch.cat([octets, octets.new_zeros(-octets.numel() % 4)])
    words = octets.view(torch.int32)
    count = words.numel()
    if count == 0:
        return 0
    total = 0
    step = TILE * TILES_AT_ONCE.get(tensor.device.type, 16)
    for start in range(0, count, step):
        total += _tiles(words[start : start + step], start, count * 4 & _MASK)
    return _last(total & _MASK64)


def _tiles(words: torch.Tensor, start: int, size: int) -> int:
    """Sum of the tiles' 64-bit values; the last tile may be short."""
    number = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device)
    value = words.to(torch.int64) & _MASK
    halves = []
    for seed, (factor, turn) in zip(_SEEDS, _KEYS, strict=True):
        key = (number * factor + seed & _MASK) ^ ((number << turn | number >> (32 - turn)) & _MASK)
        mixed = _mix(value ^ key)
        rest = -mixed.numel() % TILE
        mixed = torch.nn.functional.pad(mixed, (0, rest)).view(-1, TILE).sum(1) & _MASK
        halves.append(_mix(mixed ^ size).tolist())
    return sum(high << 32 | low for high, low in zip(*halves, strict=True))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """32 bits in, 32 bits out, in int64."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _MASK
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)


def _last(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
