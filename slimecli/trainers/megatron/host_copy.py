"""Weights of other models (reference, teacher...) kept in host memory and swapped into the one live model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """This rank's weights at the time of making it, in (pinned, where there is a GPU) host memory."""

    def __init__(self, chunks: list[Any]) -> None:
        self._tensors = [_to_host(t) for t in _live(chunks)]

    @contextlib.contextmanager
    def swapped_in(self, chunks: list[Any]) -> Iterator[None]:
        """The live model has these weights inside, and its own again afterwards, bit for bit."""
        live = _live(chunks)
        own = [_to_host(t) for t in live]
        _fill(live, self._tensors)
        try:
            yield
        finally:
            _fill(live, own)


def _live(chunks: list[Any]) -> list[Tensor]:
    """Parameters and buffers of this rank; a tied tensor once."""
    seen: dict[int, Tensor] = {}
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            seen.setdefault(id(tensor), tensor)
    return list(seen.values())


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach())


def _fill(live: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(live, values, strict=True):
            tensor.copy_(value)
