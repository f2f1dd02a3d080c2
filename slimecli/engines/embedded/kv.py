"""The key-value cache: one row per slot."""

from __future__ import annotations

import torch

from slimecli.errors import SlimeError

WINDOW = 64
"""attended lengths are rounded up to this many positions, so that shapes repeat"""
ROWS = 16
"""every matrix product has a multiple of this many rows: with fewer, the CPU's kernel depends on the row count, and
with it the last bit of the result. From 16 rows on, a row does not depend on its neighbours."""


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


class KVCache:
    """Keys and values of all layers, [layers, slots, kv_heads, max_len, head_dim] each.

    Attributes:
        kv: [layers, 2, slots, kv_heads, max_len, head_dim], keys before values: one write serves both.
    """

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.kv = torch.empty(0)
        self.allocate()

    @property
    def k(self) -> torch.Tensor:
        """The keys."""
        return self.kv[:, 0]

    @property
    def v(self) -> torch.Tensor:
        """The values."""
        return self.kv[:, 1]

    def allocate(self) -> None:
        """Take the memory. Zeros: a masked position must not hold NaN."""
        layers, slots, heads, length, size = self.shape
        try:
            self.kv = torch.zeros(layers, 2, *self.shape[1:], dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            wanted = 2 * layers * slots * heads * length * size * self.dtype.itemsize / 1e9
            raise SlimeError(
                f"{wanted:.1f} GB for the keys and values of {slots} answers of {length} tokens are not to be had",
                "lower engine.slots or engine.max_context",
            ) from None

    def free(self) -> None:
        """Give the memory back."""
        self.kv = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        return self.kv.nbytes

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slot sources[i] to slot targets[i]."""
        src = torch.tensor(sources, device=self.device)
        dst = torch.tensor(targets, device=self.device)
        for layer in self.kv:
            window = layer[:, :, :, :length]
            window[:, dst] = window[:, src]
