"""Which model class runs a folder, and what of it stays out of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded import config as folder_config
from slimecli.engines.embedded.kv import WINDOW, round_up
from slimecli.engines.embedded.model import Decoder
from slimecli.engines.embedded.slot_model import SlotModel
from slimecli.errors import SlimeError
from slimecli.model_specs import families
from slimecli.weights.check import spec_of
from slimecli.weights.maps import copies_of, rules_of
from slimecli.weights.quant import open_weights


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


def prediction_weights(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """HF name -> host memory for every weight of the folder's prediction layers (MTP), with which the engine computes
    nothing: it holds them, so that what a trainer publishes can be proved to have arrived."""
    family = families().get(str(config.get("model_type")))
    field = family.keys.get("mtp") if family else None
    if family is None or field is None or not (config.get(family.nested) or config).get(field):
        return {}
    stored = open_weights(folder)
    spec = spec_of(stored)
    out: dict[str, torch.Tensor] = {}
    for rule in rules_of(spec, 0, stored.shapes):
        if rule.key.startswith("mtp."):
            kind = torch.float32 if rule.keep_dtype else dtype
            out |= {name: torch.empty(shape, dtype=kind) for name, shape in rule.hf.items()}
    for names in copies_of(spec, stored.names).values():
        out |= {name: torch.empty(spec.vocab, spec.hidden, dtype=dtype) for name in names}
    return out
