"""Hashes of tensors that pass by in pieces: any order, any cut, several threads; the values are those of tensor_hash.

The hash of a row is a sum over its lanes, so the pieces of a row may be added up in any order. The same pass over a
piece, while it is in the CPU's cache, looks for values that are not finite.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from slimecli.weights.fingerprint import ROW, keys_array

LANE = 4
"""bytes per lane"""
Sums = np.ndarray[Any, np.dtype[np.int64]]

_NOT_FINITE: dict[torch.dtype, tuple[Any, int, int]] = {
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
    torch.float32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    torch.float8_e4m3fn: (np.uint8, 0x7F, 0x7F),
    torch.float8_e5m2: (np.uint8, 0x7F, 0x7C),
}
"""dtype -> bits as a number, the bits without the sign, the smallest of them that is no finite value"""
_local = threading.local()


class Scan(NamedTuple):
    """What one pass over a piece of a tensor found."""

    first: int
    """row that the piece begins in"""
    sums: Sums
    """contribution to the hash of that row and the following ones"""
    bad: int
    """values that are NaN or infinite"""


def scan(data: memoryview, start: int, dtype: torch.dtype) -> Scan:
    """Hash a piece and look for values that are not finite.

    Args:
        data: bytes of the piece.
        start: where in the tensor they begin (bytes).
    """
    if start % LANE or len(data) % LANE:
        # bytes of a lane that are not here count as zero; the piece that has them adds them
        padded = bytearray(-(-(start % LANE + len(data)) // LANE) * LANE)
        padded[start % LANE : start % LANE + len(data)] = data
        data, start = memoryview(padded), start - start % LANE
    lanes = np.frombuffer(data, np.int32)
    rule = _NOT_FINITE.get(dtype)
    begin = start // LANE
    first, end = begin // ROW, begin + lanes.size
    sums = np.zeros(max(1, -(-end // ROW) - first), np.int64)
    keys, (work, bits) = keys_array(), _scratch()
    bad = 0
    for number in range(len(sums)):
        low, high = max(begin, (first + number) * ROW), min(end, (first + number + 1) * ROW)
        block, product = lanes[low - begin : high - begin], work[: high - low]
        np.copyto(product, block)
        np.multiply(product, keys[low % ROW : low % ROW + high - low], out=product)
        sums[number] = np.add.reduce(product)
        if rule is not None and block.size:
            kind, mask, limit = rule
            values = block.view(kind)
            unsigned = np.bitwise_and(values, kind(mask), out=bits.view(kind)[: values.size])
            if unsigned.max() >= limit:
                bad += int(np.count_nonzero(unsigned >= kind(limit)))
    return Scan(first, sums, bad)


def _scratch() -> tuple[Sums, Any]:
    """Work space of this thread: products, and bits without signs."""
    if not hasattr(_local, "work"):
        _local.work = np.empty(ROW, np.int64), np.empty(ROW, np.int32)
    work: tuple[Sums, Any] = _local.work
    return work


class Ledger:
    """Hashes of all tensors of a model."""

    def __init__(self) -> None:
        self._rows: dict[str, Sums] = {}
        self._lock = threading.Lock()

    def add(self, name: str, nbytes: int, scanned: Scan) -> None:
        """Add a piece of a tensor of `nbytes`."""
        if len(scanned.sums) == (rows := rows_of(nbytes)):
            with self._lock:
                known = self._rows.get(name)
                self._rows[name] = scanned.sums if known is None else known + scanned.sums
            return
        with self._lock:
            if name not in self._rows:
                self._rows[name] = np.zeros(rows, np.int64)
            self._rows[name][scanned.first : scanned.first + len(scanned.sums)] += scanned.sums

    def hashes(self) -> dict[str, str]:
        """Name -> 16 hex digits, for every tensor all of whose pieces were added."""
        return {name: _finish(sums) for name, sums in self._rows.items()}


def rows_of(nbytes: int) -> int:
    """Rows that a tensor of so many bytes is hashed in."""
    return max(1, -(-nbytes // (ROW * LANE)))


def _finish(sums: Sums) -> str:
    """Hash the sums as lanes again until one is left."""
    while len(sums) > 1:
        sums = scan(sums.view(np.uint8).data, 0, torch.int64).sums
    return f"{int(sums[0]) & (2**64 - 1):016x}"
