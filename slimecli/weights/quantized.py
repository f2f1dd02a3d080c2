"""A source whose linear weights are quantised to fp8 on the way; see quant_fp8.py for the form."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from slimecli.weights.pieces import Shape, Source, octets
from slimecli.weights.quant_codec import E4M3, encode_e4m3
from slimecli.weights.quant_fp8 import BLOCK, Fp8Quantizer

SCALE = "_scale_inv"


def scale_shape(shape: Shape) -> Shape:
    """Shape of the scales of a weight, one per block."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // BLOCK[0]), -(-cols // BLOCK[1]))


class QuantizedSource:
    """Another source, with each weight of a linear layer in e4m3 and followed by its scales.

    Scales depend on blocks of 128 rows only, so a piece is quantised from the blocks it touches.
    """

    def __init__(self, source: Source, names: Iterable[str], quantizer: Fp8Quantizer) -> None:
        self._source, self._power_of_two = source, quantizer.power_of_two
        self.names: list[str] = []
        self._quantised: set[str] = set()
        for name in names:
            self.names.append(name)
            if quantizer.takes(name, source.shape(name)):
                self._quantised.add(name)
                self.names.append(name + SCALE)

    def _weight_of(self, name: str) -> str:
        """The weight that a scale belongs to; empty for what is no scale."""
        base = name.removesuffix(SCALE)
        return base if base != name and base in self._quantised else ""

    def shape(self, name: str) -> Shape:
        base = self._weight_of(name)
        if not base:
            return self._source.shape(name)
        return scale_shape(self._source.shape(base))

    def dtype(self, name: str) -> torch.dtype:
        if name in self._quantised:
            return E4M3
        return torch.float32 if self._weight_of(name) else self._source.dtype(name)

    def read_into(self, name: str, low: int, high: int, out: memoryview) -> None:
        base = self._weight_of(name)
        if not base and name not in self._quantised:
            self._source.read_into(name, low, high, out)
            return
        stored, shape = base or name, self.shape(name)
        rows, cols = self._source.shape(stored)[-2:]
        per, width = math.prod(shape[-2:]), shape[-1]
        scale = 1 if base else BLOCK[0]
        done = 0
        while low < high:
            # one matrix at a time, and of it whole blocks of rows
            matrix, stop = low // per, min(high, (low // per + 1) * per)
            first = (low % per) // width // scale
            last = -(-((stop - 1) % per + 1) // (width * scale))
            values, scales = self._encoded(stored, matrix, (first * BLOCK[0], min(rows, last * BLOCK[0])), cols)
            found = octets(scales if base else values)
            size = len(found) // ((scales if base else values).numel())
            begin = (low - matrix * per - first * scale * width) * size
            nbytes = (stop - low) * size
            out[done : done + nbytes] = found[begin : begin + nbytes]
            low, done = stop, done + nbytes

    def _encoded(self, name: str, matrix: int, span: tuple[int, int], cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of some rows of one matrix of a weight."""
        rows = self._source.shape(name)[-2]
        raw = torch.empty(span[1] - span[0], cols, dtype=self._source.dtype(name))
        start = (matrix * rows + span[0]) * cols
        self._source.read_into(name, start, start + raw.numel(), octets(raw))
        return encode_e4m3(raw, BLOCK, power_of_two=self._power_of_two)

    def close(self) -> None:
        self._source.close()
