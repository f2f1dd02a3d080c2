"""What the scheduler needs of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from slimecli.engines.embedded.kv import KVCache


class SlotModel(Protocol):
    """A causal language model over slots: `model.Decoder`, or `fallback.AnyDecoder` for the rest."""

    vocab: int
    dtype: torch.dtype
    device: torch.device
    cache: KVCache
    window_step: int
    """attended lengths are multiples of this (positions)"""
    live: dict[str, torch.Tensor]
    """HF name -> the engine's own weight; writing to it loads it"""
    aliases: dict[str, str]
    """HF name -> name of the weight it is tied to"""

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights now."""

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, count: int, window: int) -> torch.Tensor:
        """One token per slot -> [M, vocab] logits."""

    def prefill(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Fill the cache from position 0 -> [n, P, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab]."""

    def weights_changed(self) -> None:
        """Called after `live` was written to."""

    def free_weights(self) -> None:
        """Give the memory back."""

    def allocate_weights(self) -> None:
        """Take it again, content undefined."""
