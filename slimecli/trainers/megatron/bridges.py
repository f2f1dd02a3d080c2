"""Who knows which HF tensors a Megatron parameter is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from slimecli.model_specs import ModelSpec
from slimecli.trainers.megatron import mbridge, weights
from slimecli.weights.hf import HfFolder


class Bridge(Protocol):
    """HF folder <-> this rank's chunks. Both calls are collective."""

    def load_hf(self, chunks: list[Any], folder: HfFolder, spec: ModelSpec) -> None:
        """Fill the parameters."""

    def hf_tensors(
        self, chunks: list[Any], spec: ModelSpec, dtype: torch.dtype, folder: HfFolder
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor in `dtype`), in a fixed order."""


BRIDGES: dict[str, Bridge] = {"slime": weights, "mbridge": mbridge}
"""trainer.bridge -> module"""
