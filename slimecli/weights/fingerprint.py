"""A fingerprint of named tensors: the same for every transport, device and order, different for a single flipped bit.

Bytes are read as 32-bit lanes x_i. A row of 2^16 lanes hashes to sum(x_i * r_i) mod 2^64 with fixed odd pseudo-random
64-bit keys r_i; the row sums, read as lanes again, are hashed the same way until one number is left. A changed lane
always changes the sum (odd keys are invertible); other changes collide with probability 2^-31 or less per row
(multilinear hashing, Lemire and Kaser 2014). It guards against accidents, not against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from slimecli.errors import SlimeError

ROW = 1 << 16
"""lanes per row: keys, row and product together stay in a CPU's second-level cache"""
ROWS_AT_ONCE = {"cpu": 1, "cuda": 512}
"""rows per operation; bounds the temporary memory to ROW * rows * 8 bytes"""


class Fingerprint:
    """Fed tensor by tensor, in any order; no tensor is kept."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, torch.Tensor]] = {}

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor under its name; hashed on its own device, without waiting for it."""
        if name in self._seen:
            raise SlimeError(f"tensor {name!r} was given twice", "give every tensor its own name")
        header = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        self._seen[name] = (header, tensor_hash(tensor))

    def hexdigest(self) -> str:
        """32 hex digits over names, dtypes, shapes and values so far."""
        digest = hashlib.sha256()
        for _, (header, value) in sorted(self._seen.items()):
            digest.update(header.encode() + _octets(value))
        return digest.hexdigest()[:32]

    def digests(self) -> dict[str, str]:
        """16 hex digits per tensor, to name the one that differs."""
        return {name: _digest(*seen) for name, seen in self._seen.items()}

    def digest(self, name: str) -> str:
        """The entry of one tensor in `digests`."""
        return _digest(*self._seen[name])


def fingerprint(pairs: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The fingerprint of all pairs."""
    total = Fingerprint()
    for name, tensor in pairs:
        total.update(name, tensor)
    return total.hexdigest()


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """The entry of one tensor in `Fingerprint.digests`."""
    mark = Fingerprint()
    mark.update(name, tensor)
    return mark.digest(name)


def _octets(value: torch.Tensor) -> bytes:
    return int(value.item()).to_bytes(8, "little", signed=True)


def _digest(header: str, value: torch.Tensor) -> str:
    return hashlib.sha256(header.encode() + _octets(value)).hexdigest()[:16]


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """[] int64 on the tensor's device: a hash of its bytes in element order."""
    lanes = _lanes(tensor.detach())
    while True:
        lanes = _row_sums(lanes).view(torch.int32)
        if lanes.numel() == 2:
            return lanes.view(torch.int64)[0]


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] int32 view of the bytes; a copy only where the memory is not contiguous or the size no multiple of four."""
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros(1, dtype=torch.int32, device=tensor.device)
    octets = flat.view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        padded = torch.zeros(-(-octets.numel() // 4) * 4, dtype=torch.uint8, device=tensor.device)
        padded[: octets.numel()] = octets
        octets = padded
    return octets.view(torch.int32)


def _row_sums(lanes: torch.Tensor) -> torch.Tensor:
    """[rows] int64: the multilinear hash of every row of ROW lanes; the last row may be short."""
    keys = _keys(str(lanes.device))
    whole = lanes.numel() // ROW
    sums = torch.empty(whole + (lanes.numel() % ROW > 0), dtype=torch.int64, device=lanes.device)
    at_once = ROWS_AT_ONCE.get(lanes.device.type, 1)
    work = torch.empty(min(whole, at_once), ROW, dtype=torch.int64, device=lanes.device)
    table = lanes[: whole * ROW].view(whole, ROW)
    for start in range(0, whole, at_once):
        stop = min(start + at_once, whole)
        product = work[: stop - start].copy_(table[start:stop]).mul_(keys)
        torch.sum(product, dim=1, out=sums[start:stop])
    rest = lanes[whole * ROW :]
    if rest.numel():
        sums[-1] = (rest.to(torch.int64) * keys[: rest.numel()]).sum()
    return sums


@lru_cache(maxsize=8)
def _keys(device: str) -> torch.Tensor:
    """[ROW] odd 64-bit keys by SplitMix64, the same on every machine."""
    return torch.from_numpy(keys_array().copy()).to(device)


@lru_cache(maxsize=1)
def keys_array() -> np.ndarray[Any, np.dtype[np.int64]]:
    """The keys on the CPU."""
    z = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return z.view(np.int64)
