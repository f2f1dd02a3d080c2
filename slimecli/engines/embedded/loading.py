"""Which model class runs a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded import config as folder_config
from slimecli.engines.embedded.kv import WINDOW, round_up
from slimecli.engines.embedded.model import Decoder
from slimecli.engines.embedded.slot_model import SlotModel
from slimecli.errors import SlimeError


def build_model(
    folder: Path, config: dict[str, Any], slots: int, max_context: int, dtype: str, device: torch.device
) -> SlotModel:
    """The own decoder where the architecture is known, else the fallback over transformers."""
    kind = folder_config.pick_dtype(dtype, config, device)
    if folder_config.why_not(config):
        from slimecli.engines.embedded.fallback import AnyDecoder

        return AnyDecoder(folder, slots=slots, max_len=max_context, dtype=kind, device=device)
    shape = folder_config.DecoderConfig.from_dict(config)
    if max_context > shape.max_positions:
        raise SlimeError(
            f"max_context {max_context} exceeds the model's {shape.max_positions} positions", "lower engine.max_context"
        )
    return Decoder(shape, slots=slots, max_len=round_up(max_context, WINDOW), dtype=kind, device=device)
